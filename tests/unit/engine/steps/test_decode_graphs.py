"""Recorded steps: the sizes, what is written in place, and that replaying gives what computing gives.

Without a GPU a step is recorded as itself: it reads the same memory, changed in place, as a captured one would.
"""

from __future__ import annotations

import gc
import logging
import random
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from farsight.core.errors import IntegrityError
from farsight.core.request import Request, SamplingParams
from farsight.engine.attention.layout import DecodeInputs, StepSizes, row_sizes, table_widths
from farsight.engine.attention.torch_attention import TorchAttention
from farsight.engine.checkpoint.model_config import load_model_config
from farsight.engine.checkpoint.weights import load_weights
from farsight.engine.kv_pool import KVPool
from farsight.engine.models.model import DecoderModel
from farsight.engine.sequence import Sequence
from farsight.engine.steps.backends import GraphBackend, TorchBackend
from farsight.engine.steps.decode_graphs import DecodeGraphs, DecodeSize, LaunchedTokens, StaticInputs
from farsight.engine.steps.model_runner import ModelRunner
from farsight.kvcache import StepBatch, StepItem
from tests.unit.engine.driver import Driver
from tests.unit.engine.families.shapes import FAMILIES
from tests.unit.engine.small_models import save_model

BLOCK = 4


def test_sizes() -> None:
    assert row_sizes(1) == [1]
    assert row_sizes(7) == [1, 2, 4, 7]
    assert row_sizes(128) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128]
    assert row_sizes(100)[-2:] == [96, 100]
    assert table_widths(5) == [5]
    assert table_widths(8) == [8]
    assert table_widths(200) == [8, 32, 128, 200]


class Recorder:
    """Records work as itself, and counts what is replayed."""

    def __init__(self, room: int | None = None) -> None:
        self.num_recorded = 0
        self.num_replayed = 0
        self.num_waits = 0
        self._room = room

    def synchronize(self) -> None:
        self.num_waits += 1

    def __call__(self, run: Callable[[], object]) -> Callable[[], None]:
        if self.num_recorded == self._room:
            raise torch.OutOfMemoryError("out of memory")
        self.num_recorded += 1

        def replay() -> None:
            self.num_replayed += 1
            run()

        return replay


MakeRunners = Callable[..., tuple[ModelRunner, ModelRunner]]


def make_runners(directory: Path, recorder: Recorder, max_rows: int = 6) -> tuple[ModelRunner, ModelRunner]:
    """The same model with recorded steps and without, over pools full of NaN."""
    config = load_model_config(directory)
    weights = load_weights(directory, config, torch.float32)
    made, sizes = [], StepSizes(max_rows, 256 // BLOCK)
    for graphs in (True, False):
        pool = KVPool(config, num_blocks=200, block_size=BLOCK, dtype=torch.float32)
        for cache in (*pool.keys, *pool.values):
            cache.fill_(float("nan"))
        attention = TorchAttention(config.sliding_windows)
        backend = (
            GraphBackend(config, weights, pool, 256, attention, sizes, recorder, recorder.synchronize)
            if graphs
            else TorchBackend(config, weights, pool, 256, attention)
        )
        made.append(ModelRunner(config, pool, backend, 256))
    return made[0], made[1]


@pytest.fixture
def runners(model_dir: Callable[[str], Path]) -> MakeRunners:
    def make(shape: str, recorder: Recorder, max_rows: int = 6) -> tuple[ModelRunner, ModelRunner]:
        return make_runners(model_dir(shape), recorder, max_rows)

    return make


def test_steps_with_experts_are_computed_not_replayed(tmp_path: Path) -> None:
    """Which experts compute depends on the tokens: a recording would compute those of the step that was recorded."""
    recorder = Recorder()
    drivers = [Driver(runner) for runner in make_runners(save_model(tmp_path, **FAMILIES["mixtral"]), recorder)]
    for driver in drivers:
        for name in ("a", "b"):
            driver.add(name, [5, 6, 7 + len(driver.sequences)], temperature=0.0)
        driver.step(a=3, b=3)
    for _ in range(5):
        found, expected = (driver.step(a=1, b=1) for driver in drivers)
        assert found == expected
    assert recorder.num_recorded == recorder.num_replayed == 0


@pytest.mark.parametrize("shape", ["gqa", "mistral", "opt", "qwen3"])
def test_replayed_steps_give_what_computed_ones_give(shape: str, runners: MakeRunners) -> None:
    """Batches that grow and shrink, among them some too large and some with prompts, which are not replayed."""
    recorder = Recorder()
    drivers = [Driver(runner) for runner in runners(shape, recorder)]
    assert recorder.num_recorded == 4 * 3  # 1, 2, 4 and 6 rows; 8, 32 and 64 blocks
    rng = random.Random(1)
    names = [f"s{i}" for i in range(8)]
    num_decoding = 0
    for name in names:
        prompt = [rng.randrange(3, 300) for _ in range(rng.choice((1, 5, 30, 140)))]
        temperature = float(rng.random() < 0.5)
        for driver in drivers:
            driver.add(name, prompt, temperature=temperature, seed=3)
            driver.step(**{name: len(prompt)})
    recorder.num_replayed -= sum(driver.sequences[n].prompt_len == 1 for n in names)
    for _ in range(40):
        chosen = rng.sample(names, rng.randint(1, 8))
        num_decoding += len(chosen) <= 6
        found, expected = (driver.step(**dict.fromkeys(chosen, 1)) for driver in drivers)
        assert found == expected
    assert 0 < num_decoding == recorder.num_replayed


def test_steps_that_were_got_ready_are_replayed_alike(runners: MakeRunners, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some with more rows than were recorded; tokens come late, or with ``go_on``."""
    recorder = Recorder()
    drivers = [Driver(runner) for runner in runners("gqa", recorder)]
    compute = drivers[0].runner.execute
    rng = random.Random(2)
    names = [f"s{i}" for i in range(8)]

    def get_ready(batch: StepBatch, sequences: Mapping[str, Sequence]) -> list[int | None]:
        if all(item.num_tokens == 1 and item.samples for item in batch.items):
            last = [sequences[item.request_id].token_ids.pop() for item in batch.items]
            assert drivers[0].runner.look_ahead(batch, sequences)
            if rng.random() < 0.5:
                drivers[0].runner.go_on(batch, last)
            for item, token in zip(batch.items, last, strict=True):
                sequences[item.request_id].token_ids.append(token)
        return compute(batch, sequences)

    monkeypatch.setattr(drivers[0].runner, "execute", get_ready)
    for driver in drivers:
        for i, name in enumerate(names):
            driver.add(name, [5 + i + j for j in range(3 + i)], temperature=float(i % 2), seed=3)
            driver.step(**{name: 3 + i})
    for _ in range(30):
        chosen = rng.sample(names, rng.randint(1, 8))
        found, expected = (driver.step(**dict.fromkeys(chosen, 1)) for driver in drivers)
        assert found == expected
    assert recorder.num_replayed > 10


def test_what_was_recorded_is_kept(runners: MakeRunners) -> None:
    """A recording of kernels keeps no memory alive; the work, which holds what they read, must not go."""
    recorded: list[weakref.ref[Callable[[], object]]] = []

    class Forgetful(Recorder):
        def __call__(self, run: Callable[[], object]) -> Callable[[], None]:
            recorded.append(weakref.ref(run))
            return lambda: None

    runner = runners("gqa", Forgetful())[0]
    gc.collect()
    assert len(recorded) == 12 and all(work() is not None for work in recorded)
    del runner


def test_what_is_written_in_place() -> None:
    prompts = {"a": (10, 11, 12, 13, 14, 15), "b": (20, 21)}
    sequences = {name: Sequence.of(Request(name, 1, "", prompt, SamplingParams(1))) for name, prompt in prompts.items()}
    inputs = StaticInputs(DecodeSize(4, 3), torch.device("cpu"))
    before = [tensor.data_ptr() for tensor in (inputs.rows, inputs.decode.kv_lens, inputs.decode.block_tables)]
    items = [StepItem("a", 5, 1, True, [7, 3]), StepItem("b", 1, 1, True, [9, 8, 2])]
    inputs.fill(decode_inputs(items, sequences), 300)
    assert inputs.rows.tolist() == [[15, 21, 21, 21], [5, 1, 1, 1], [3 * 4 + 1, 9 * 4 + 1, 37, 37]]
    assert inputs.decode.kv_lens.tolist() == [6, 2, 2, 2]
    assert inputs.decode.block_tables.tolist() == [[7, 3, 7], [9, 9, 9], [9, 9, 9], [9, 9, 9]]
    assert [t.data_ptr() for t in (inputs.rows, inputs.decode.kv_lens, inputs.decode.block_tables)] == before
    with pytest.raises(IntegrityError, match="token ids 15"):
        inputs.fill(decode_inputs(items[:1], sequences), 15)


def decode_inputs(items: list[StepItem], sequences: dict[str, Sequence]) -> DecodeInputs:
    inputs = DecodeInputs.ahead(items, sequences, BLOCK)
    inputs.complete()
    return inputs


def test_which_steps_are_replayed(model_dir: Callable[[str], Path]) -> None:
    config = load_model_config(model_dir("gqa"))
    pool = KVPool(config, num_blocks=60, block_size=BLOCK, dtype=torch.float32)
    model = DecoderModel(config, load_weights(model_dir("gqa"), config, torch.float32), 240)
    launched = LaunchedTokens(5, torch.device("cpu"))
    graphs = DecodeGraphs(model, pool, TorchAttention(config.sliding_windows), StepSizes(5, 60), Recorder(), launched)

    def find(*starts: int, num_tokens: int = 1, samples: bool = True) -> DecodeSize | None:
        return graphs.find([StepItem("a", start, num_tokens, samples, []) for start in starts])

    assert find(0) == DecodeSize(1, 8)
    assert find(31, 5, 0) == DecodeSize(4, 8)
    assert find(32, 5, 0, 1, 1) == DecodeSize(5, 32)
    assert find(239) == DecodeSize(1, 60)
    assert find(*range(6)) is None
    assert find(3, num_tokens=2) is None
    assert find(3, samples=False) is None


def test_no_memory_to_record(runners: MakeRunners, caplog: pytest.LogCaptureFixture) -> None:
    """What could not be recorded is computed."""
    recorder = Recorder(room=2)
    with caplog.at_level(logging.WARNING):
        driver = Driver(runners("gqa", recorder)[0])
    assert "10 of 12 sizes of steps are not recorded, and slower: out of memory" in caplog.text
    driver.add("a", [5, 6, 7])
    driver.step(a=3)
    assert driver.step(a=1)[0] is not None
    assert recorder.num_replayed == 0


def test_a_step_that_brings_nothing_is_waited_for(runners: MakeRunners) -> None:
    """What times the step would not see its end."""
    recorder = Recorder()
    driver = Driver(runners("gqa", recorder)[0])
    driver.add("a", list(range(5, 25)))
    driver.step(a=12)
    assert recorder.num_waits == 1
    driver.step(a=8)
    driver.step(a=1)
    assert recorder.num_waits == 1
