"""Steps that are launched before anything of the one before them is known: the tokens are the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from farsight.actors.worker.step_loop import Step, StepLoop
from farsight.core.config.engine import EngineConfig
from farsight.core.messages.tokens import TokenDelta
from farsight.core.request import SamplingParams
from farsight.engine import Engine, cuda
from farsight.engine.attention.attention import DecodePart, PrefillPart, StaticDecode, StepLayout
from farsight.engine.attention.layout import StepSizes, token_sizes
from farsight.engine.attention.torch_attention import TorchAttention
from farsight.engine.checkpoint.model_config import load_model_config
from farsight.engine.checkpoint.weights import load_weights
from farsight.engine.devices import model_device
from farsight.engine.kv_pool import KVPool
from farsight.engine.native.sampler import NativeSampler
from farsight.engine.runner import Launch
from farsight.engine.steps import backends
from farsight.engine.steps.backends import GraphBackend, TorchBackend
from farsight.engine.steps.mixed_graphs import MixedSize
from farsight.engine.steps.model_runner import ModelRunner
from farsight.engine.worker import Worker
from farsight.kvcache import StepBatch
from tests.unit.engine.driver import Driver

BLOCK = 4


def as_it_is(run: Callable[[], object]) -> Callable[[], None]:
    """Records work as itself."""

    def replay() -> None:
        run()

    return replay


class Rows:
    """Attention of a recorded step by torch, which reads its sizes when it attends, not when it is recorded."""

    def __init__(self, decode: StaticDecode, pool: KVPool, attention: TorchAttention) -> None:
        self._decode, self._pool, self._attention = decode, pool, attention

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        decode, none = self._decode, torch.zeros(0, dtype=torch.int64)
        out = torch.full((len(query), query[0].numel()), torch.nan)
        lens = decode.kv_lens[decode.kv_lens > 0].tolist()
        assert decode.chunks is not None
        found: dict[int, list[list[int]]] = {}
        for table, first_row, num_tokens, first in decode.chunks.tolist():
            if num_tokens:
                found.setdefault(table, []).append([first_row, num_tokens, first])
        chunks = [(table, sorted(blocks)) for table, blocks in sorted(found.items())]
        chunk_lens = tuple(sum(block[1] for block in blocks) for _, blocks in chunks)
        ends = tuple(blocks[-1][1] + blocks[-1][2] for _, blocks in chunks)
        rows = len(lens) + sum(chunk_lens)
        assert [blocks[0][0] for _, blocks in chunks] == [
            len(lens) + sum(chunk_lens[:i]) for i in range(len(chunk_lens))
        ]
        tables = decode.block_tables.long()

        def used(numbers: list[int], ends: tuple[int, ...]) -> Tensor:
            width = -(-max(ends) // BLOCK)
            places = torch.arange(width)[None] < torch.tensor([-(-end // BLOCK) for end in ends])[:, None]
            return torch.where(places, tables[numbers, :width], tables[numbers, :1])

        layout = StepLayout(
            none,
            none,
            none,
            none,
            none,
            DecodePart(used(list(range(len(lens))), tuple(lens)), tuple(lens)) if lens else None,
            PrefillPart(used([table for table, _ in chunks], ends), chunk_lens, ends) if chunks else None,
        )
        step = self._attention.begin_step(layout, self._pool)
        out[:rows] = step.attend(layer, query[:rows], key[:rows], value[:rows], sinks)
        return out


class Recording(TorchAttention):
    """Torch attention that steps with chunks can be recorded with; padding gets NaN."""

    block_tokens = 3

    def begin_static(self, decode: StaticDecode, pool: KVPool):
        return super().begin_static(decode, pool) if decode.chunks is None else Rows(decode, pool, self)

    def cut_chunks(self, chunk_lens, kv_lens, first_row, first_table) -> np.ndarray:
        blocks = []
        for table, (chunk_len, kv_len) in enumerate(zip(chunk_lens, kv_lens, strict=True), first_table):
            for done in range(0, chunk_len, self.block_tokens):
                size = min(self.block_tokens, chunk_len - done)
                blocks.append((table, first_row + done, size, kv_len - chunk_len + done))
            first_row += chunk_len
        return np.array(blocks[::-1], dtype=np.int32)


def make_runners(directory: Path) -> tuple[ModelRunner, ModelRunner]:
    """The same model with recorded steps of all kinds and without."""
    config = load_model_config(directory)
    weights = load_weights(directory, config, torch.float32)
    made = []
    for graphs in (True, False):
        pool = KVPool(config, num_blocks=200, block_size=BLOCK, dtype=torch.float32, spare=True)
        for cache in (*pool.keys, *pool.values):
            cache.fill_(torch.nan)
        attention = Recording(config.sliding_windows)
        sizes = StepSizes(6, 256 // BLOCK, 100)
        backend = (
            GraphBackend(config, weights, pool, 256, attention, sizes, as_it_is, lambda: None)
            if graphs
            else TorchBackend(config, weights, pool, 256, TorchAttention(config.sliding_windows))
        )
        made.append(ModelRunner(config, pool, backend, 256))
    return made[0], made[1]


def test_sizes_of_steps_with_chunks() -> None:
    assert token_sizes(0) == []
    assert token_sizes(40) == [16, 32, 64]
    assert token_sizes(544)[-2:] == [512, 640]
    assert token_sizes(8192)[-1] == 2048


@pytest.mark.parametrize("shape", ["gqa", "mistral"])
def test_recorded_steps_with_chunks_are_computed_ones(
    shape: str, model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows, whole prompts and chunks behind tokens, in steps that fill a size and that do not; some are too large."""
    recorded: list[int] = []
    runners = make_runners(model_dir(shape))
    backend = runners[0].backend
    assert isinstance(backend, GraphBackend)
    launch = backend._mixed.launch

    def launching(size: MixedSize, *given: Any) -> Tensor:
        recorded.append(size.tokens)
        return launch(size, *given)

    monkeypatch.setattr(backend._mixed, "launch", launching)
    ours, reference = (Driver(runner) for runner in runners)
    rng = random.Random(5)
    for i in range(6):
        for driver in (ours, reference):
            driver.add(f"s{i}", [3 + (i * 7 + j) % 200 for j in range(20 + 15 * i)], temperature=float(i % 2), seed=i)
    for _ in range(30):
        names = rng.sample(list(ours.sequences), rng.randint(1, 6))
        work = {name: min(ours.remaining(name), rng.choice((1, 9, 16, 90))) for name in names}
        assert ours.step(**work) == reference.step(**work)
    assert len(recorded) > 10 and {16, 32, 64} <= set(recorded)


SAMPLING = [
    SamplingParams(30),
    SamplingParams(20, ignore_eos=True),
    SamplingParams(45, ignore_eos=True),
    SamplingParams(20, temperature=0.8, seed=9),
    SamplingParams(30, stop=("a",)),
    SamplingParams(12, logprobs=2, ignore_eos=True),
]


DRAWN = [
    SamplingParams(25, temperature=1.2, top_k=50, top_p=0.9, min_p=0.01, seed=10),
    SamplingParams(15, temperature=0.7, repetition_penalty=1.2, seed=11),
]


class Answers:
    """What clients get of an engine under ``StepLoop``; requests come while it runs, and one goes."""

    def __init__(self, engine: Engine, coming: list[SamplingParams]) -> None:
        self.deltas: dict[str, list[TokenDelta]] = {}
        self._engine, self._coming = engine, list(enumerate(coming))
        self._loop = StepLoop(engine.worker, self._take, lambda outputs: None)

    def run(self) -> dict[str, tuple[list[int], str, str | None]]:
        self._submit(4)
        while not self._engine.idle:
            self._loop.run()
        self._engine.check_integrity()
        return {
            rid: ([t for d in deltas for t in d.token_ids], "".join(d.text for d in deltas), deltas[-1].finish_reason)
            for rid, deltas in self.deltas.items()
        }

    def _take(self, step: Step) -> None:
        assert not step.failures
        for output in self._engine.worker.render(step.emissions):
            self.deltas.setdefault(output.delta.request_id, []).append(output.delta)
            if output.delta.finish_reason:
                self._submit(1)
        self._engine.report()

    def _submit(self, count: int) -> None:
        for i, sampling in self._coming[:count]:
            self._engine.submit([5 + (i * 31 + j) % 90 for j in range(3 + 5 * i % 40)], sampling)
        del self._coming[:count]


class ProcessorDraws:
    """Draws in place of the kernel, which is tested elsewhere; a padding row keeps the token that is there."""

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self._sampler = NativeSampler()
        self._params: list[SamplingParams] = []
        self._positions: list[int] = []

    def fill(self, params: SequenceOf[SamplingParams], positions: SequenceOf[int]) -> None:
        names = ("temperature", "top_k", "top_p", "min_p", "seed")  # what the kernel reads
        self._params = [SamplingParams(1, **{name: getattr(each, name) for name in names}) for each in params]
        self._positions = list(positions)

    def draw(self, logits: Tensor, tokens: Tensor) -> None:
        num_rows = len(self._params)
        tokens[:num_rows] = torch.tensor(self._sampler.sample(logits[:num_rows], self._params, self._positions))


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Devices are put together as on a GPU, over memory of this machine."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cuda, "device_problem", lambda: None)
    monkeypatch.setattr(cuda, "free_bytes", lambda share, step, more_bytes: 1 << 22)
    monkeypatch.setattr(cuda, "Graphs", lambda: lambda run: run)
    monkeypatch.setattr(cuda, "synchronize", lambda: None)
    monkeypatch.setattr(backends, "make_draws", lambda sizes, config, device: ProcessorDraws(sizes.rows[-1]))
    monkeypatch.setattr(model_device, "load_device", model_device.load_gpu_device)
    monkeypatch.setattr(
        model_device, "gpu_attention", lambda name, config, pool, sizes: Recording(config.sliding_windows)
    )


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """How each step was launched."""
    found: list[Launch] = []
    launch = Worker.launch

    def launching(self: Worker, batch: StepBatch) -> Launch:
        found.append(launch(self, batch))
        return found[-1]

    monkeypatch.setattr(Worker, "launch", launching)
    return found


def engine(model_dir: Path, max_num_seqs: int = 4) -> Engine:
    options = EngineConfig(
        kv_memory="1MiB", block_size=BLOCK, num_threads=1, max_num_seqs=max_num_seqs, backend="torch", speculation="off"
    )
    return Engine(model_dir, dtype="float32", engine=options)


def test_answers_are_those_of_steps_one_by_one(
    tiny_model_dir: Path, on_a_gpu: None, launched: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs end by EOS, by length and by stop strings while the next step is on its way; others wait for places."""
    coming = [*SAMPLING, *SAMPLING[:3], *SAMPLING[:3], *DRAWN]
    found = Answers(engine(tiny_model_dir), coming).run()
    assert launched.count(Launch.BEFORE) > 30
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "launch", lambda self, batch, sequences: Launch.NOT)
        assert Answers(engine(tiny_model_dir), coming).run() == found
    assert {end for _, _, end in found.values()} == {"length", "stop"}


@pytest.mark.parametrize("drawn", [False, True])
def test_a_batch_that_shrinks_goes_on_without_the_host(
    drawn: bool, tiny_model_dir: Path, on_a_gpu: None, launched: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs end one after the other by length; no step but the first waits for the one before it."""
    prompts = [[5 + i, 6, 7] for i in range(6)]
    options: dict[str, Any] = {"temperature": 0.9, "top_k": 100, "top_p": 0.9, "min_p": 0.01} if drawn else {}
    params = [SamplingParams(10 + 3 * i, ignore_eos=True, seed=i, **options) for i in range(6)]
    ours = engine(tiny_model_dir, 8)
    found = ours.generate(prompts, params)
    ours.check_integrity()
    assert (launched.count(Launch.NOW), launched.count(Launch.BEFORE)) == (1, 24)
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "launch", lambda self, batch, sequences: Launch.NOT)
        assert engine(tiny_model_dir, 8).generate(prompts, params) == found


def test_a_row_without_a_token_fails_alone(tiny_model_dir: Path, on_a_gpu: None, launched: list[Launch]) -> None:
    """Its client is told why, though the next step has been launched; the others go on."""
    ours = engine(tiny_model_dir)
    runner = ours.worker.runner
    assert isinstance(runner, ModelRunner)
    names = [ours.submit([5 + i, 6, 7], SamplingParams(12, ignore_eos=True)) for i in range(3)]
    deltas: dict[str, list[TokenDelta]] = {name: [] for name in names}
    for step in range(30):
        if step == 5:  # the keys of its first block, which the steps to come read
            block = ours.worker.executor.blocks.table(names[1])[0]
            runner.pool.keys[0][block * BLOCK].fill_(torch.nan)
        for delta in ours.step():
            deltas[delta.request_id].append(delta)
    assert [deltas[name][-1].finish_reason for name in names] == ["length", "error", "length"]
    assert "NaN" in (deltas[names[1]][-1].error or "")
    assert launched.count(Launch.BEFORE) > 5
    ours.check_integrity()


def test_what_was_launched_for_sequences_that_are_gone_is_dropped(
    tiny_model_dir: Path, on_a_gpu: None, launched: list[Launch]
) -> None:
    ours = engine(tiny_model_dir)
    first = ours.submit([5, 6, 7], SamplingParams(40, ignore_eos=True))
    for _ in range(5):
        ours.step()
    ours.abort(first)
    second = ours.submit([8, 9, 10], SamplingParams(9, ignore_eos=True))
    deltas = [delta for _ in range(12) for delta in ours.step()]
    assert {delta.request_id for delta in deltas} <= {first, second}
    tokens = tuple(token for delta in deltas if delta.request_id == second for token in delta.token_ids)
    ours.check_integrity()
    (alone,) = engine(tiny_model_dir).generate([[8, 9, 10]], SamplingParams(9, ignore_eos=True))
    assert tokens == alone.token_ids
