"""The compiled step behind its C interface: failures that Python is told of, and threads that end.

What torch is given to compile instead is compiled once; the compiler behind, which takes a minute, is left out.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import shutil
import signal
import subprocess
import time
from ctypes import byref
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from farsight.engine.checkpoint.model_config import load_model_config
from farsight.engine.checkpoint.weights import load_weights
from farsight.engine.kv_pool import KVPool
from farsight.engine.native.library import COMPILE_FLAGS
from farsight.engine.native.model import NativeBackend
from farsight.engine.native.structures import _Layer
from farsight.engine.steps.backends import TorchBackend
from farsight.engine.steps.model_runner import ModelRunner
from tests.unit.engine.driver import Driver


def runner(model_dir: Path, num_threads: int) -> ModelRunner:
    return ModelRunner.from_dir(
        model_dir, dtype=torch.float32, num_blocks=8, block_size=16, backend="native", num_threads=num_threads
    )


TASKS = Path("/proc/self/task")


def helpers() -> set[str]:
    """Numbers of the threads that compute steps in this process; those of other tests' models are among them."""
    found = set()
    for task in TASKS.iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended since it was listed
            if (task / "comm").read_text().strip() == "farsight-step":
                found.add(task.name)
    return found


@pytest.mark.skipif(not TASKS.exists(), reason="the system does not list threads")
def test_a_model_takes_its_threads_with_it(tiny_model_dir: Path) -> None:
    for _ in range(5):
        before = helpers()
        made = runner(tiny_model_dir, 4)
        Driver(made).add("a", [5, 6, 7])
        own = helpers() - before
        assert len(own) == 3
        del made
        gc.collect()
        deadline = time.monotonic() + 60.0
        while own & helpers():  # the system lists a thread a little longer than it can be waited for
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_torch_computes_on_one_thread_beside_the_team(tiny_model_dir: Path) -> None:
    torch.set_num_threads(2)
    runner(tiny_model_dir, 2)
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("columns", "error", "text"),
    [(2**20, MemoryError, "out of memory"), (2**31 - 2, RuntimeError, "vector|length")],
)
def test_a_matrix_that_fits_nowhere(tiny_model_dir: Path, columns: int, error: type[Exception], text: str) -> None:
    """No C++ exception passes through Python: the call says what happened, and the model computes on."""
    made = runner(tiny_model_dir, 2)
    backend = made.backend
    assert isinstance(backend, NativeBackend)
    layer = _Layer()
    layer.qkv.n, layer.qkv.k = 2**31 - 64, columns
    with pytest.raises(error, match=f"fs_add_layer: .*({text})"):
        backend.model._call("fs_add_layer", backend.model.handle, byref(layer))
    driver = Driver(made)
    driver.add("a", [5, 6, 7])
    assert len(driver.step(a=3)) == 1


HERE = Path(__file__).parent
CASES = ("once", "crowded", "sleeps", "throws", "leaves_no_thread", "forks", "signals", "refused")
GUARD_S = 300

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("team") / "team_check"
    flags = [flag for flag in COMPILE_FLAGS if flag != "-O3"]
    subprocess.run(["c++", *flags, "-O1", str(HERE / "team_check.cpp"), "-o", str(built)], check=True)
    return built


@pytest.mark.parametrize("case", CASES)
def test_team(program: Path, case: str) -> None:
    done = subprocess.run([program, case], capture_output=True, text=True, timeout=GUARD_S, check=False)
    assert done.returncode == 0, done.stderr


def test_a_stopped_process_goes_on(program: Path) -> None:
    """SIGSTOP in the middle of jobs, several times."""
    with subprocess.Popen([program, "once"], stderr=subprocess.PIPE, text=True) as process:
        for _ in range(5):
            if process.poll() is None:
                process.send_signal(signal.SIGSTOP)
                time.sleep(0.01)
                process.send_signal(signal.SIGCONT)
                time.sleep(0.01)
        _, problem = process.communicate(timeout=GUARD_S)
    assert process.returncode == 0, problem


def test_once_for_all_layers_and_batches(model_dir, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    config = load_model_config(model_dir("qwen3"))
    weights = load_weights(model_dir("qwen3"), config, torch.float32)
    drivers = []
    for compiled in (True, False):
        pool = KVPool(config, num_blocks=64, block_size=4, dtype=torch.float32)
        backend = TorchBackend(config, weights, pool, 256, compiled=compiled)
        drivers.append(Driver(ModelRunner(config, pool, backend, 256)))
    rng = random.Random(0)
    for name, length in (("a", 30), ("b", 7), ("c", 50)):
        prompt = [rng.randrange(3, 300) for _ in range(length)]
        for driver in drivers:
            driver.add(name, prompt)
    for work in ({"a": 20}, {"b": 7, "a": 10}, {"c": 50, "a": 1}, {"a": 1, "b": 1, "c": 1}, {"a": 1}, {"b": 1}):
        found, expected = (driver.step(**work) for driver in drivers)
        assert found == expected
    assert counter.frame_count == 4  # before and after attention; many rows, and one
