"""The forward pass against transformers: any shape of model, any cut of the work into steps, on any backend.

Where the device has no memory for a step, it is computed in parts.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch

from farsight.core.config.engine import EngineConfig
from farsight.core.errors import ConfigError, IntegrityError
from farsight.core.request import SamplingParams
from farsight.engine.attention.torch_attention import TorchAttention
from farsight.engine.checkpoint.model_config import load_model_config
from farsight.engine.checkpoint.weights import load_weights
from farsight.engine.engine import Engine
from farsight.engine.kv_pool import KVPool
from farsight.engine.native import library
from farsight.engine.native.library import NativeUnavailable
from farsight.engine.native.model import NativeBackend
from farsight.engine.sampling.sampler import StepLogits
from farsight.engine.sequence import Sequence
from farsight.engine.steps import backends
from farsight.engine.steps.backends import TorchBackend
from farsight.engine.steps.careful_steps import CarefulSteps
from farsight.engine.steps.model_runner import ModelRunner
from farsight.kvcache import StepBatch, StepItem
from tests.unit.engine.driver import Driver
from tests.unit.engine.small_models import SHAPES, load_reference


def random_ids(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, 300) for _ in range(length)]


@torch.inference_mode()
def reference_logits(model, token_ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([token_ids])).logits[0, -1].float()


def mixed_steps(runner: ModelRunner) -> list[tuple[list[int], torch.Tensor]]:
    """Decode rows of many lengths, whole prompts and later chunks in the same steps; tokens and their logits."""
    driver = Driver(runner)
    rng = random.Random(1)
    names = [f"s{i}" for i in range(5)]
    for name, length in zip(names, (1, 3, 9, 21, 40), strict=True):
        driver.add(name, random_ids(rng, length))
    results = []
    for _ in range(12):
        work = {name: rng.randint(1, driver.remaining(name)) for name in names if rng.random() < 0.8}
        if not work:
            continue
        for name, logits in zip(work, driver.logits(**work), strict=True):
            if logits is not None:
                token_ids = driver.sequences[name].token_ids
                results.append((list(token_ids), logits))
                token_ids.append(rng.randrange(3, 300))
    assert len(results) > 15
    return results


@pytest.mark.parametrize("shape", SHAPES)
def test_float32_is_transformers(shape, make_runner, model_dir):
    reference = load_reference(model_dir(shape))
    for token_ids, logits in mixed_steps(make_runner(shape)):
        assert (logits - reference_logits(reference, token_ids)).abs().max() < 1e-4


@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_is_as_exact_as_transformers(shape, make_runner, model_dir):
    """Rounding differs with the order of additions, so both are held against exact arithmetic on the same weights."""
    reference = load_reference(model_dir(shape), torch.bfloat16)
    exact = load_reference(model_dir(shape), torch.bfloat16).float()
    ours, theirs = [], []
    for token_ids, logits in mixed_steps(make_runner(shape, "bfloat16")):
        truth = reference_logits(exact, token_ids)
        ours.append((logits - truth).square().mean())
        theirs.append((reference_logits(reference, token_ids) - truth).square().mean())
    assert torch.stack(ours).mean().sqrt() < 1.2 * torch.stack(theirs).mean().sqrt()


@pytest.mark.parametrize("make_runner", ["torch"], indirect=True)
def test_one_long_row_does_not_pad_the_others(make_runner, monkeypatch):
    parts: list[int] = []
    begin_step = TorchAttention.begin_step

    def spy(self, layout, pool):
        attention = begin_step(self, layout, pool)
        parts.extend(part.num_gathered for part in attention._parts)
        return attention

    driver = Driver(make_runner())
    for name, length in (("a", 4), ("b", 100), ("c", 7)):
        driver.add(name, random_ids(random.Random(6), length))
        driver.step(**{name: length})
    monkeypatch.setattr(TorchAttention, "begin_step", spy)
    driver.step(a=1, b=1, c=1)
    assert parts == [26, 4]  # blocks of 4 tokens: 101 tokens, then 5 and 8


@pytest.mark.parametrize(
    ("start", "num_tokens", "blocks"), [(0, 4, [0]), (2, 2, [0]), (0, 0, [0]), (0, 3, []), (2, 1, [])]
)
def test_impossible_item(start, num_tokens, blocks, make_runner):
    driver = Driver(make_runner())
    driver.add("a", [5, 6, 7])
    batch = StepBatch((StepItem("a", start, num_tokens, True, blocks),))
    with pytest.raises(IntegrityError, match="a: step over tokens"):
        driver.runner.execute(batch, driver.sequences)


def test_empty_step(make_runner):
    with pytest.raises(IntegrityError, match="without items"):
        make_runner().execute(StepBatch(()), {})


class SmallDevice(TorchBackend):
    """Computes so many tokens at once and no more; what a step had written by then stays."""

    room = 10**9
    num_tokens: list[int]

    def run(
        self,
        batch: StepBatch,
        order: list[int],
        sequences: Mapping[str, Sequence],
        more_rows: list[int] | None = None,
        *,
        with_hidden: bool = False,
    ) -> StepLogits:
        found = super().run(batch, order, sequences, more_rows, with_hidden=with_hidden)
        if batch.num_tokens > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.num_tokens.append(batch.num_tokens)
        return found


@pytest.fixture
def make(model_dir: Callable[[str], Path]) -> Callable[[int], tuple[Driver, SmallDevice, CarefulSteps, list[int]]]:
    config = load_model_config(model_dir("gqa"))
    weights = load_weights(model_dir("gqa"), config, torch.float32)

    def make(room: int) -> tuple[Driver, SmallDevice, CarefulSteps, list[int]]:
        pool = KVPool(config, num_blocks=64, block_size=4, dtype=torch.float32)
        backend = SmallDevice(config, weights, pool, 256, TorchAttention(config.sliding_windows))
        backend.room, backend.num_tokens = room, []
        recoveries: list[int] = []
        careful = CarefulSteps(lambda: recoveries.append(1))
        return Driver(ModelRunner(config, pool, backend, 256, careful=careful)), backend, careful, recoveries

    return make


def work(driver: Driver, **sampling: object) -> list[list[int | None]]:
    """Prompts and decode rows in the same steps."""
    rng = random.Random(0)
    for name, length in (("a", 30), ("b", 7), ("c", 50)):
        driver.add(name, [rng.randrange(3, 300) for _ in range(length)], temperature=1.0, seed=5, **sampling)
    steps = [driver.step(a=20), driver.step(b=7, a=10), driver.step(c=50, a=1, b=1)]
    return steps + [driver.step(c=1, a=1, b=1) for _ in range(5)]


@pytest.mark.parametrize("room", [1, 2, 3, 5, 16, 40])
def test_the_same_tokens_in_parts(make, room: int, caplog: pytest.LogCaptureFixture) -> None:
    expected = work(make(10**9)[0])
    driver, backend, careful, recoveries = make(room)
    with caplog.at_level(logging.WARNING):
        assert work(driver) == expected
    assert max(backend.num_tokens) <= room
    assert careful.num_ooms == driver.runner.num_ooms == len(recoveries) > 0
    assert careful.max_tokens is not None and careful.max_tokens <= room
    assert "out of memory in a step of" in caplog.text


def test_later_steps_do_not_run_into_it_again(make) -> None:
    driver, _, careful, _ = make(16)
    work(driver)
    num_ooms = careful.num_ooms
    driver.add("d", list(range(5, 60)))
    driver.step(d=55, a=1)
    assert careful.num_ooms == num_ooms


def test_log_probabilities_of_parts(make) -> None:
    """A prompt that brings log probabilities stays in one piece."""
    found = []
    for room in (10**9, 20):
        driver, _, careful, _ = make(room)
        driver.add("a", list(range(5, 23)), logprobs=2, prompt_logprobs=True)
        driver.add("b", list(range(30, 45)), logprobs=1)
        tokens = driver.runner.execute(driver.batch(b=15, a=18), driver.sequences)
        found.append((list(tokens), tokens.logprobs))
        assert (careful.num_ooms > 0) == (room == 20)
    (tokens, logprobs), (in_parts, logprobs_in_parts) = found
    assert tokens == in_parts
    assert len(logprobs[1].prompt) == len(logprobs_in_parts[1].prompt) == 17
    assert set(logprobs) == set(logprobs_in_parts) == {0, 1}


def test_what_cannot_be_cut_fails(make) -> None:
    driver, _, _, _ = make(0)
    driver.add("a", [5, 6, 7])
    with pytest.raises(torch.OutOfMemoryError):
        driver.step(a=3)
    driver, _, _, _ = make(5)
    driver.add("a", list(range(5, 15)), prompt_logprobs=True, logprobs=0)
    with pytest.raises(torch.OutOfMemoryError):
        driver.step(a=10)


def test_other_errors_are_not_its_business(make) -> None:
    driver, backend, careful, _ = make(100)
    backend.run = lambda *args: 1 / 0
    driver.add("a", [5])
    with pytest.raises(ZeroDivisionError):
        driver.step(a=1)
    assert careful.num_ooms == 0


def runner(model_dir: Path, backend: str, block_size: int = 16, dtype: torch.dtype = torch.float32) -> ModelRunner:
    return ModelRunner.from_dir(model_dir, dtype=dtype, num_blocks=8, block_size=block_size, backend=backend)


def test_auto_is_the_compiled_step(tiny_model_dir: Path) -> None:
    assert isinstance(runner(tiny_model_dir, "auto").backend, NativeBackend)
    assert isinstance(runner(tiny_model_dir, "torch").backend, backends.TorchBackend)


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"block_size": 8}, "block_size 8: multiples of 16"), ({"dtype": torch.float16}, "float16: float32 and bfloat16")],
)
def test_what_is_not_compiled(
    tiny_model_dir: Path, options: dict, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert isinstance(runner(tiny_model_dir, "auto", **options).backend, backends.TorchBackend)
    assert reason in caplog.text
    with pytest.raises(ConfigError, match=rf"engine\.backend: got 'native', expected auto or torch \(.*{reason}"):
        runner(tiny_model_dir, "native", **options)


@pytest.fixture
def fresh_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Nothing is built yet."""
    monkeypatch.setenv("FARSIGHT_CACHE", str(tmp_path))
    library.load_library.cache_clear()
    yield tmp_path
    library.load_library.cache_clear()


def test_no_compiler(
    tiny_model_dir: Path, fresh_library: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NativeUnavailable, match="no C\\+\\+ compiler"):
        library.load_library()
    with caplog.at_level(logging.WARNING):
        assert isinstance(runner(tiny_model_dir, "auto").backend, backends.TorchBackend)
    (said,) = [line for line in caplog.messages if "torch operations" in line]
    for lost in (
        "several times slower",
        "without speculation",
        "8 bits",
        "a request's tokens",
        "install one, such as g++",
    ):
        assert lost in said


def test_a_compiler_that_fails(fresh_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(NativeUnavailable, match="false fails: no message"):
        library.load_library()
    assert list(fresh_library.iterdir()) == []


def test_a_process_that_builds_the_step_says_so(fresh_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []

    def build(compiler: str, path: Path, parts: library.Parts) -> None:
        told.append(library.is_compiling())
        raise NativeUnavailable("no room")

    monkeypatch.setattr(library, "_build", build)
    monkeypatch.setattr("shutil.which", lambda name: "/bin/true")
    with pytest.raises(NativeUnavailable, match="no room"):
        library.load_library()
    assert told == [True] and not library.is_compiling()


TWO_AT_ONCE = """#!/bin/sh
# A compiler that begins the first two parts only once both are there.
case " $* " in
*" -c "*)
    touch "$0.$$"
    until [ "$(ls "$0".* | wc -l)" -ge 2 ]; do sleep 0.01; done
    ;;
esac
exec c++ "$@"
"""


def test_it_is_built_once_in_parts_side_by_side(
    fresh_library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    quickly = ["-O0" if flag == "-O3" else flag for flag in library.COMPILE_FLAGS]
    monkeypatch.setattr(library, "COMPILE_FLAGS", quickly)
    monkeypatch.setattr(library, "usable_processors", lambda: 2)
    compiler = tmp_path_factory.mktemp("compiler") / "c++"
    compiler.write_text(TWO_AT_ONCE)
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    library.load_library()
    assert len(list(compiler.parent.glob("c++.*"))) == len(library.PARTS)
    (built,) = fresh_library.iterdir()
    written = built.stat().st_mtime_ns
    library.load_library.cache_clear()
    library.load_library()
    assert [path.stat().st_mtime_ns for path in fresh_library.iterdir()] == [written]


@pytest.mark.parametrize("token_id", [-1, 10_000])
def test_a_token_that_the_model_does_not_have(tiny_model_dir: Path, token_id: int) -> None:
    """A compiled program would read anything: it is told before."""
    driver = Driver(runner(tiny_model_dir, "native"))
    driver.add("a", [5, token_id, 7])
    with pytest.raises(IntegrityError, match=f"token ids .*{token_id}.* of 3"):
        driver.step(a=3)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_both_give_the_same_tokens(tiny_model_dir: Path, num_threads: int) -> None:
    """Many requests in a small pool, greedy and drawn; prompts in chunks, sequences preempted."""
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 300) for _ in range(rng.randint(1, 90))] for _ in range(24)]
    params = [SamplingParams(20, temperature=i % 2, seed=i, ignore_eos=True) for i in range(24)]
    outputs = []
    for backend in ("native", "torch"):
        config = EngineConfig(
            block_size=16, num_threads=num_threads, kv_memory="128KiB", max_batch_tokens=64, backend=backend
        )
        engine = Engine(tiny_model_dir, dtype="float32", engine=config)
        outputs.append([completion.token_ids for completion in engine.generate(prompts, params)])
        assert engine.scheduler.num_preemptions > 0
    torch.set_num_threads(1)
    assert outputs[0] == outputs[1]
