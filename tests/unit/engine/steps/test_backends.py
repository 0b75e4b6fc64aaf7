"""Which backend computes, what happens where the compiled one cannot be had, and that both give the same tokens."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from core.config.engine import EngineConfig
from core.errors import ConfigError, IntegrityError
from core.request import SamplingParams
from engine.engine import Engine
from engine.native import library
from engine.native.library import NativeUnavailable
from engine.native.model import NativeBackend
from engine.steps import backends
from engine.steps.model_runner import ModelRunner
from tests.unit.engine.driver import Driver


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


def test_no_compiler(tiny_model_dir: Path, fresh_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NativeUnavailable, match="no C\\+\\+ compiler"):
        library.load_library()
    assert isinstance(runner(tiny_model_dir, "auto").backend, backends.TorchBackend)


def test_a_compiler_that_fails(fresh_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(NativeUnavailable, match="false fails: no message"):
        library.load_library()
    assert list(fresh_library.iterdir()) == []


def test_a_process_that_builds_the_step_says_so(fresh_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []

    def build(compiler: str, path: Path) -> None:
        told.append(library.is_compiling())
        raise NativeUnavailable("no room")

    monkeypatch.setattr(library, "_build", build)
    monkeypatch.setattr("shutil.which", lambda name: "/bin/true")
    with pytest.raises(NativeUnavailable, match="no room"):
        library.load_library()
    assert told == [True] and not library.is_compiling()


def test_it_is_built_once(fresh_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quickly = ["-O0" if flag == "-O3" else flag for flag in library.COMPILE_FLAGS]
    monkeypatch.setattr(library, "COMPILE_FLAGS", quickly)
    library.load_library()
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
