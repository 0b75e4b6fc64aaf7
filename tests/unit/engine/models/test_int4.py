"""Weights of 4 bits: how far they are off, what they weigh, and that a model of them runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine.models.int4 import GROUP, pack_linear, pack_weights

from core.config.engine import EngineConfig
from core.config.scheduling import SchedulerConfig
from core.errors import ConfigError
from core.request import SamplingParams
from engine import Engine
from engine.build import build_worker
from engine.checkpoint.model_config import load_model_config
from engine.checkpoint.weights import Linear, PackedLinear, load_weights
from engine.steps.backends import NativeBackend, TorchBackend
from engine.steps.model_runner import ModelRunner


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding(tiny_model_dir, dtype: torch.dtype) -> None:
    """No weight is off by more than half a step, which is a seventh of the largest in its group."""
    weights = load_weights(tiny_model_dir, load_model_config(tiny_model_dir), dtype)
    packed = pack_weights(weights)
    for layer, rounded in zip(weights.layers, packed.layers, strict=True):
        for name in ("qkv", "out", "up", "down"):
            before, after = getattr(layer, name), getattr(rounded, name)
            assert isinstance(after, PackedLinear)
            assert after.packed.nbytes * 2 == before.weight.numel()
            largest = before.weight.float().abs().amax(1, keepdim=True)  # rows of 64 and 112 are one group each
            assert after.dense().dtype is dtype
            off = (after.dense().float() - before.weight.float()).abs()
            assert (off <= largest / 7 * (0.5 if dtype is torch.float32 else 0.55) + 1e-7).all()
            assert off.max() > 0
    assert packed.embedding is weights.embedding


def test_groups_have_scales_of_their_own() -> None:
    weight = torch.cat([torch.full((3, GROUP), 1e-3), torch.full((3, GROUP), -50.0), torch.zeros(3, GROUP)], 1)
    packed = pack_linear(Linear(weight, None))
    torch.testing.assert_close(packed.dense(), weight)
    assert packed.scales.shape == (3, 3)


def test_a_model_of_them(tiny_model_dir) -> None:
    """The compiled step does not know them."""
    options: dict[str, Any] = {"dtype": torch.float32, "num_blocks": 8, "block_size": 16}
    assert isinstance(ModelRunner.from_dir(tiny_model_dir, packed=True, **options).backend, TorchBackend)
    assert isinstance(ModelRunner.from_dir(tiny_model_dir, **options).backend, NativeBackend)
    with pytest.raises(ConfigError, match="weights of 4 bits are not compiled"):
        ModelRunner.from_dir(tiny_model_dir, packed=True, backend="native", **options)


@pytest.mark.parametrize(
    ("preset", "weights", "packed"),
    [("magnus-vsq", "auto", True), ("magnus-vs", "auto", False), ("magnus-vsq", "full", False), ("fcfs", "int4", True)],
)
def test_who_runs_on_them(preset: str, weights: str, packed: bool, tiny_model_dir) -> None:
    engine = EngineConfig(kv_memory="1MiB", num_threads=1, weights=weights)
    worker = build_worker(tiny_model_dir, "float32", engine, "w", scheduler=SchedulerConfig(preset=preset))
    assert isinstance(worker.runner, ModelRunner)
    assert isinstance(worker.runner.backend, TorchBackend if packed else NativeBackend)


def test_an_answer_of_theirs(tiny_model_dir) -> None:
    config = EngineConfig(kv_memory="1MiB", num_threads=1, weights="int4")
    (answer,) = Engine(tiny_model_dir, dtype="float32", engine=config).generate(
        [[5, 6, 7]], SamplingParams(8, ignore_eos=True)
    )
    assert len(answer.token_ids) == 8
