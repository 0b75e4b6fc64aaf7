"""Checkpoints of GPTQ, AWQ, compressed-tensors, FP8 and gpt-oss's MXFP4 (blocks of 32 values of four bits with one
exponent): kept as they are quantised, or as the floats that they mean."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from farsight.core.errors import InvalidValueError
from farsight.engine.checkpoint.check import check_checkpoint
from farsight.engine.checkpoint.config_fields import CheckpointError, UnsupportedModelError
from farsight.engine.checkpoint.model_config import load_model_config
from farsight.engine.checkpoint.quantized import QuantizedLinear
from farsight.engine.checkpoint.weights import Linear, ModelWeights, load_weights
from farsight.engine.parallel.mesh import Mesh, Part
from farsight.engine.parallel.shards import load_shard
from tests.unit.engine.driver import PROMPTS, greedy_answers
from tests.unit.engine.families.shapes import FAMILIES
from tests.unit.engine.quantized_files import FORMATS, GROUP, quantize_directory
from tests.unit.engine.small_models import save_model

QUERIES = "model.layers.0.self_attn.q_proj."
MATRICES = ("qkv", "out", "up", "down")


@pytest.fixture(scope="module")
def wide_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("wide"), hidden_size=128, intermediate_size=192, num_key_value_heads=4)


@pytest.fixture(scope="module")
def made(wide_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    return {name: quantize_directory(wide_dir, tmp_path_factory.mktemp("quantized"), name) for name in FORMATS}


def load(path: Path, *, keep: bool) -> ModelWeights:
    return load_weights(path, load_model_config(path), torch.float32, keep_quantized=keep)


@pytest.mark.parametrize("name", FORMATS)
def test_matrices_are_what_the_format_means(name, made):
    stored, plain = made[name]
    expected = load(plain, keep=False)
    bits_and_group = FORMATS[name][2]
    for keep in (True, False):
        for ours, theirs in zip(load(stored, keep=keep).layers, expected.layers, strict=True):
            for matrix in MATRICES:
                found, wanted = getattr(ours, matrix), getattr(theirs, matrix).dense(torch.float32)
                assert torch.allclose(found.dense(torch.float32), wanted, rtol=1e-6, atol=1e-7)
                if not keep or bits_and_group is None:
                    assert isinstance(found, Linear)
                else:
                    assert isinstance(found, QuantizedLinear)
                    assert (found.bits, found.group) == (bits_and_group[0], bits_and_group[1] or found.inputs)
    assert torch.equal(expected.embedding, load(stored, keep=True).embedding)


@pytest.mark.parametrize("name", ["gptq", "gptq desc_act", "awq", "w4a16", "w8a8", "fp8 blocks", "mxfp4"])
def test_the_engine_runs_them(name, made, request):
    stored, plain = request.getfixturevalue("gpt_oss") if name == "mxfp4" else made[name]
    assert greedy_answers(stored, "torch") == greedy_answers(plain, "torch")
    assert [len(each) for each in greedy_answers(stored, "native")] == [12] * len(PROMPTS)


def test_symmetric_zero_points_need_no_minima(made):
    stored, _ = made["w4a16"]
    assert load(stored, keep=True).layers[0].out.minima is None  # type: ignore[union-attr]
    stored, _ = made["awq"]
    assert load(stored, keep=True).layers[0].out.minima is not None  # type: ignore[union-attr]


def test_ranks_read_their_parts(made):
    stored, plain = made["gptq"]
    parts = [Part(load_model_config(path), Mesh(2, 1), 1) for path in (stored, plain)]
    ours, theirs = (load_shard(path, part, torch.float32) for path, part in zip((stored, plain), parts, strict=True))
    for own, other in zip(ours.layers, theirs.layers, strict=True):
        for matrix in MATRICES:
            found, wanted = getattr(own, matrix).weight, getattr(other, matrix).weight
            assert torch.allclose(found, wanted, rtol=1e-6, atol=1e-7)


def change(stored: Path, out: Path, matrix: str = QUERIES, **tensors: Tensor | None) -> Path:
    """A copy with other members of one matrix; None takes one away."""
    shutil.copytree(stored, out)
    held: dict[str, Any] = dict(load_file(stored / "model.safetensors"))
    held |= {matrix + end: tensor for end, tensor in tensors.items()}
    save_file({name: tensor for name, tensor in held.items() if tensor is not None}, out / "model.safetensors")
    return out


@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        ("gptq", {"qzeros": None}),
        ("gptq", {"scales": torch.zeros(3, 128, dtype=torch.float16)}),
        ("gptq", {"qweight": torch.zeros(16, 128, dtype=torch.int64)}),
        ("gptq", {"qweight": torch.zeros(15, 128, dtype=torch.int32)}),
        ("gptq", {"qweight": torch.zeros(16, dtype=torch.int32)}),
        ("gptq", {"g_idx": torch.zeros(7, dtype=torch.int32)}),
        ("awq", {"scales": torch.zeros((), dtype=torch.float16)}),
        ("w4a16", {"weight_scale": torch.zeros(128, 0)}),
        ("w4a16 asymmetric", {"weight_zero_point": None}),
        ("w8a8", {"weight_scale": torch.zeros(64, 1)}),
        ("w8a8", {"weight": torch.zeros(128, 128, dtype=torch.int16)}),
        ("fp8 channels", {"weight_scale": None}),
        ("fp8 blocks", {"weight_scale_inv": torch.zeros(128, 1)}),
    ],
)
def test_members_that_do_not_fit_are_named_before_any_is_read(name, tensors, made, tmp_path):
    broken = change(made[name][0], tmp_path / "broken", **tensors)
    with pytest.raises(CheckpointError) as caught:
        check_checkpoint(broken, load_model_config(broken))
    assert caught.value.field.startswith(QUERIES)


def test_empty_biases_of_old_files_are_nothing(made, tmp_path):
    stored = made["gptq"][0]
    with_zeros = change(stored, tmp_path / "zeros", bias=torch.zeros(128, dtype=torch.float16))
    ours, theirs = (load(path, keep=True).layers[0].qkv for path in (with_zeros, stored))
    assert torch.equal(ours.dense(torch.float32), theirs.dense(torch.float32))
    with_bias = change(stored, tmp_path / "bias", bias=torch.ones(128, dtype=torch.float16))
    with pytest.raises(CheckpointError, match=r"q_proj\.bias"):
        load(with_bias, keep=True)


def test_a_group_that_does_not_exist_is_refused(made, tmp_path):
    groups = torch.full((128,), 128 // GROUP, dtype=torch.int32)
    broken = change(made["gptq"][0], tmp_path / "broken", g_idx=groups)
    with pytest.raises(CheckpointError, match="g_idx"):
        load(broken, keep=True)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method"),
        ("gptq", "quantization_config"),
        ({"quant_method": "gptq", "bits": 3}, "bits"),
        ({"quant_method": "gptq", "bits": True}, "bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "config_groups"),
        (FORMATS["w4a16"][0] | {"format": "marlin-24"}, "format"),
        (FORMATS["w8a8"][0] | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        (FORMATS["w8a8"][0] | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format"),
        (FORMATS["w8a8"][0] | {"config_groups": {"a": {}, "b": {}}}, "config_groups"),
    ],
)
def test_what_is_not_read_says_what_to_do(settings, named, wide_dir, tmp_path):
    config = json.loads((wide_dir / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    with pytest.raises(UnsupportedModelError) as caught:
        load_model_config(tmp_path)
    assert caught.value.field.startswith("quantization_config") and named in caught.value.field
    assert isinstance(caught.value, InvalidValueError)


EXPERTS = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model with random blocks, and the same in float32; transformers says what the blocks mean."""
    out = tmp_path_factory.mktemp("gpt-oss")
    plain = save_model(out / "plain", **FAMILIES["gpt-oss"] | {"hidden_size": 64, "intermediate_size": 96})
    stored = shutil.copytree(plain, out / "stored")
    tensors = load_file(plain / "model.safetensors")
    packed: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(3)
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            packed[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        shape = (experts, outputs, inputs // 32, 16)
        blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        scales = torch.randint(121, 125, shape[:3], dtype=torch.uint8, generator=generator)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        assert tensors[name].shape == tensor.shape
    save_file(packed, stored / "model.safetensors")
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (stored / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return stored, plain


@pytest.mark.parametrize("keep", [True, False])
def test_experts_are_what_the_format_means(keep: bool, gpt_oss: tuple[Path, Path]) -> None:
    """Not one bit is lost: eight bits hold twice each value of four bits."""
    stored, plain = gpt_oss
    for ours, theirs in zip(load(stored, keep=keep).layers, load(plain, keep=False).layers, strict=True):
        assert ours.experts is not None and theirs.experts is not None
        found, wanted = ((*each.experts.up, *each.experts.down) for each in (ours, theirs) if each.experts)
        for matrix, other in zip(found, wanted, strict=True):
            assert isinstance(matrix, QuantizedLinear) == keep
            assert torch.equal(matrix.dense(torch.float32), other.dense(torch.float32))
            assert matrix.bias is not None and other.bias is not None and torch.equal(matrix.bias, other.bias)


@pytest.mark.parametrize(
    ("end", "tensor"),
    [
        ("blocks", None),
        ("scales", None),
        ("scales", torch.zeros(6, 192, 3, dtype=torch.uint8)),
        ("scales", torch.zeros(6, 192, 2, dtype=torch.int8)),
        ("blocks", torch.zeros(6, 192, 2, 8, dtype=torch.uint8)),
        ("blocks", torch.zeros(6, 192, 32, dtype=torch.uint8)),
    ],
)
def test_experts_that_do_not_fit_are_named(
    end: str, tensor: Tensor | None, gpt_oss: tuple[Path, Path], tmp_path: Path
) -> None:
    broken = change(gpt_oss[0], tmp_path / "broken", f"{EXPERTS}_", **{end: tensor})
    with pytest.raises(CheckpointError) as caught:
        check_checkpoint(broken, load_model_config(broken))
    assert caught.value.field.startswith(EXPERTS)
