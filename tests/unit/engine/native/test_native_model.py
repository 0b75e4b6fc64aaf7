"""The compiled step behind its C interface: failures that Python is told of, and threads that end."""

from __future__ import annotations

import gc
import os
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


def own_threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system does not list threads")
def test_a_model_takes_its_threads_with_it(tiny_model_dir: Path) -> None:
    gc.collect()  # models of other tests take theirs now
    before = own_threads()
    for _ in range(5):
        made = runner(tiny_model_dir, 4)
        Driver(made).add("a", [5, 6, 7])
        assert own_threads() == before + 3
        del made
        gc.collect()
        assert own_threads() == before


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
        backend._model._call("fs_add_layer", backend._model._handle, byref(layer))
    driver = Driver(made)
    driver.add("a", [5, 6, 7])
    assert len(driver.step(a=3)) == 1
