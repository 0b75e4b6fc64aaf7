"""The compiled step behind its C interface: failures that Python is told of, and threads that end."""

from __future__ import annotations

import contextlib
import gc
import time
from ctypes import byref
from pathlib import Path

import pytest
import torch

from engine.native.model import NativeBackend, _Layer
from engine.steps.model_runner import ModelRunner
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
