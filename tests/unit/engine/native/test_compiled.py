"""What torch is given to compile: it is compiled once, not for each layer or batch, and gives the same.

Torch traces it; the compiler behind, which takes a minute, is left out.
"""

from __future__ import annotations

import functools
import random

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from engine.checkpoint.model_config import load_model_config
from engine.checkpoint.weights import load_weights
from engine.kv.kv_pool import KVPool
from engine.steps.backends import TorchBackend
from engine.steps.model_runner import ModelRunner
from tests.unit.engine.driver import Driver


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
