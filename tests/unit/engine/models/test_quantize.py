"""Weights of 8 and 4 bits: how far they are off, what they weigh, and that models of them run."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from farsight.core.config.engine import EngineConfig
from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.errors import ConfigError, InvalidValueError
from farsight.core.request import Request, SamplingParams
from farsight.engine.build import build_worker
from farsight.engine.checkpoint.model_config import load_model_config
from farsight.engine.checkpoint.quantized import JoinedLinear, QuantizedLinear, pack_nibbles
from farsight.engine.checkpoint.weights import Linear, ModelWeights, load_weights
from farsight.engine.models.quantize import GROUPS, quantize_linear, quantize_weights
from farsight.engine.native.model import NativeBackend, matrix_problem
from farsight.engine.parallel.links import Ranks
from farsight.engine.parallel.mesh import Mesh
from farsight.engine.sequence import Sequence
from farsight.engine.steps.backends import TorchBackend
from farsight.engine.steps.model_runner import ModelRunner
from farsight.kvcache import StepBatch, StepItem

STEPS = {8: 127, 4: 8}
"""Steps from 0 to the largest weight of a group."""


@pytest.mark.parametrize("bits", [8, 4])
def test_rounding(tiny_model_dir, bits: int) -> None:
    """Half a step; a whole one where the largest weight of a group has the other sign. Scales have 8 bits."""
    weights = load_weights(tiny_model_dir, load_model_config(tiny_model_dir), torch.float32)
    rounded = quantize_weights(weights, bits)
    for layer, after in zip(weights.layers, rounded.layers, strict=True):
        for name in ("qkv", "out", "up", "down"):
            before, matrix = getattr(layer, name), getattr(after, name)
            assert isinstance(matrix, QuantizedLinear)
            assert (matrix.bits, matrix.values.numel() * 8) == (bits, before.weight.numel() * bits)
            size = before.weight.view(*matrix.scales.shape, matrix.group).abs().amax(-1, keepdim=True) / STEPS[bits]
            off = (matrix.dense(torch.float32) - before.weight).view(*matrix.scales.shape, -1).abs() / size
            assert off.max() <= (0.8 if bits == 8 else 1.05)
            assert 0 < off.mean() < 1 / 3
    assert rounded.embedding is weights.embedding
    assert isinstance(rounded.lm_head, QuantizedLinear)
    assert rounded.lm_head.bits == 8


@pytest.mark.parametrize("bits", [8, 4])
def test_groups_have_scales_of_their_own(bits: int) -> None:
    size = GROUPS[bits]
    weight = torch.cat([torch.full((3, size), 2.0**-10), torch.full((3, size), -64.0), torch.zeros(3, size)], 1)
    rounded = quantize_linear(Linear(weight, None), bits)
    assert isinstance(rounded, QuantizedLinear)
    torch.testing.assert_close(rounded.dense(torch.float32), weight, rtol=0.005, atol=0)
    assert rounded.scales.shape == (3, 3)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("inputs", "group"), [(256, None), (96, 32), (112, 16), (36, 36)])
def test_groups_divide_a_row(bits: int, inputs: int, group: int | None) -> None:
    rounded = quantize_linear(Linear(torch.randn(2, inputs), None), bits)
    assert isinstance(rounded, QuantizedLinear)
    assert rounded.group == (group or GROUPS[bits])


def test_rows_of_odd_length_stay_as_they_are() -> None:
    linear = Linear(torch.randn(2, 66), None)
    assert quantize_linear(linear, 8) is linear


def test_what_a_checkpoint_brings_is_kept_unless_another_width_is_asked_for() -> None:
    values = torch.randint(-128, 128, (64, 64), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    own = QuantizedLinear(values, torch.ones(64, 1), None, 8, 64, torch.ones(64))
    joined = JoinedLinear((own, own))
    assert quantize_linear(own, 8) is own
    assert quantize_linear(joined, 8) is joined
    for linear in (own, joined):
        other = quantize_linear(linear, 4)
        assert isinstance(other, QuantizedLinear)
        assert (other.bits, other.outputs) == (4, linear.outputs)
        assert torch.equal(other.bias, torch.ones(linear.outputs))  # type: ignore[arg-type]


def test_nibbles_are_what_they_were() -> None:
    integers = torch.arange(16, dtype=torch.uint8).repeat(2, 2)
    weights = QuantizedLinear(pack_nibbles(integers), torch.full((2, 1), 0.5), None, 4, 32)
    assert torch.equal(weights.integers(), integers)
    assert torch.equal(weights.dense(torch.float32), (integers.float() - 8) / 2)
    with_minima = QuantizedLinear(weights.values, weights.scales, torch.full((2, 1), 3.0), 4, 32)
    assert torch.equal(with_minima.dense(torch.float32), integers.float() / 2 - 3)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("bits", {"bits": 5}),
        ("values", {"values": torch.zeros(4, 64)}),
        ("values", {"values": torch.zeros(64, 4, dtype=torch.int8).T}),
        ("group", {"group": 48}),
        ("group", {"group": 2}),
        ("scales", {"scales": torch.ones(4, 1)}),
        ("scales", {"scales": torch.ones(4, 2, dtype=torch.bfloat16)}),
        ("minima", {"minima": torch.ones(3, 2)}),
    ],
)
def test_a_record_that_does_not_fit_is_refused(field: str, change: dict[str, Any]) -> None:
    record: dict[str, Any] = {
        "values": torch.zeros(4, 64, dtype=torch.int8),
        "scales": torch.ones(4, 2),
        "minima": None,
        "bits": 8,
        "group": 32,
    }
    QuantizedLinear(**record)
    with pytest.raises(InvalidValueError, match=f"^{field}"):
        QuantizedLinear(**(record | change))


@pytest.mark.parametrize("bits", [8, 4])
def test_compiled_and_torch_steps_of_them_agree(tiny_model_dir, bits: int) -> None:
    """Torch unpacks the weights and leaves the activations as they are."""
    config = load_model_config(tiny_model_dir)
    logits = []
    for backend, kind in (("native", NativeBackend), ("torch", TorchBackend)):
        runner = ModelRunner.from_dir(
            tiny_model_dir, dtype=torch.float32, num_blocks=8, block_size=16, backend=backend, bits=bits
        )
        assert isinstance(runner.backend, kind)
        logits.append(_logits(runner, [5, 6, 7, 8, 9, 10]))
    close = torch.nn.functional.cosine_similarity(logits[0], logits[1], dim=-1)
    assert close.min() > 0.99, close
    assert logits[0].shape == (6, config.vocab_size)


def _logits(runner: ModelRunner, tokens: list[int]) -> torch.Tensor:
    sequence = Sequence.of(Request("r", 0, "", tuple(tokens), SamplingParams(1)))
    batch = StepBatch((StepItem("r", 0, len(tokens), True, [3]),))
    return runner.backend.run(batch, [0], {"r": sequence}, list(range(len(tokens) - 1))).logits.clone()


def test_parts_that_fill_no_panel_are_not_compiled(tiny_model_dir) -> None:
    part = QuantizedLinear(torch.zeros(48, 64, dtype=torch.int8), torch.ones(48, 1), None, 8, 64)
    joined = quantize_linear(JoinedLinear((part, part)), 8)
    weights = load_weights(tiny_model_dir, load_model_config(tiny_model_dir), torch.float32)
    layer = dataclasses.replace(weights.layers[0], out=joined)
    assert matrix_problem(weights) is None
    problem = matrix_problem(dataclasses.replace(weights, layers=(layer,)))
    assert problem is not None
    assert "multiples of 64 outputs" in problem


@pytest.mark.parametrize(
    ("preset", "weights", "bits"),
    [
        ("magnus-vsq", "auto", 4),
        ("magnus-vs", "auto", 0),
        ("magnus-vsq", "full", 0),
        ("fcfs", "int4", 4),
        ("fcfs", "int8", 8),
    ],
)
def test_who_runs_on_them(
    preset: str, weights: str, bits: int, tiny_model_dir, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def quantize(full: ModelWeights, bits: int) -> ModelWeights:
        asked.append(bits)
        return quantize_weights(full, bits)

    monkeypatch.setattr("farsight.engine.steps.model_runner.quantize_weights", quantize)
    engine = EngineConfig(kv_memory="1MiB", num_threads=1, weights=weights)
    worker = build_worker(tiny_model_dir, "float32", engine, "w", scheduler=SchedulerConfig(preset=preset))
    assert isinstance(worker.runner, ModelRunner)
    assert isinstance(worker.runner.backend, NativeBackend)
    assert asked == ([bits] if bits else [])


def test_ranks_refuse_them(tiny_model_dir) -> None:
    engine = EngineConfig(kv_memory="1MiB", num_threads=1, weights="int4")
    ranks = object.__new__(Ranks)
    object.__setattr__(ranks, "mesh", Mesh(2, 1))
    with pytest.raises(ConfigError, match="weights: got 'int4', expected full or float where a replica has several"):
        build_worker(tiny_model_dir, "float32", engine, "w", ranks=ranks)
