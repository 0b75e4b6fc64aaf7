"""gpt-oss with its experts in MXFP4, as published: blocks of 32 values of four bits with one exponent."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from core.config.engine import EngineConfig
from core.request import SamplingParams
from engine import Engine
from engine.checkpoint.check import check_checkpoint
from engine.checkpoint.config_fields import CheckpointError
from engine.checkpoint.model_config import load_model_config
from engine.checkpoint.quantized import QuantizedLinear
from engine.checkpoint.weights import ModelWeights, load_weights
from tests.unit.engine.families.shapes import FAMILIES
from tests.unit.engine.small_models import save_model

SMALL = EngineConfig(kv_memory="4MiB", block_size=16, max_num_seqs=8, max_batch_tokens=32, num_threads=1)
PROMPTS = [[3, 7, 11, 200, 41], [150, 4], list(range(20, 60))]
EXPERTS = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def stored_and_plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
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


def load(path: Path, *, keep: bool) -> ModelWeights:
    return load_weights(path, load_model_config(path), torch.float32, keep_quantized=keep)


@pytest.mark.parametrize("keep", [True, False])
def test_experts_are_what_the_format_means(keep: bool, stored_and_plain: tuple[Path, Path]) -> None:
    """Not one bit is lost: eight bits hold twice each value of four bits."""
    stored, plain = stored_and_plain
    for ours, theirs in zip(load(stored, keep=keep).layers, load(plain, keep=False).layers, strict=True):
        assert ours.experts is not None and theirs.experts is not None
        found, wanted = ((*each.experts.up, *each.experts.down) for each in (ours, theirs) if each.experts)
        for matrix, other in zip(found, wanted, strict=True):
            assert isinstance(matrix, QuantizedLinear) == keep
            assert torch.equal(matrix.dense(torch.float32), other.dense(torch.float32))
            assert matrix.bias is not None and other.bias is not None and torch.equal(matrix.bias, other.bias)


def test_the_engine_runs_them(stored_and_plain: tuple[Path, Path]) -> None:
    stored, plain = stored_and_plain

    def tokens(path: Path, backend: str) -> list[tuple[int, ...]]:
        engine = Engine(path, dtype="float32", engine=dataclasses.replace(SMALL, backend=backend))
        return [each.token_ids for each in engine.generate(PROMPTS, SamplingParams(8, ignore_eos=True))]

    assert tokens(stored, "torch") == tokens(plain, "torch")
    assert [len(each) for each in tokens(stored, "native")] == [8] * len(PROMPTS)


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
def test_what_does_not_fit_is_named(
    end: str, tensor: Tensor | None, stored_and_plain: tuple[Path, Path], tmp_path: Path
) -> None:
    broken = shutil.copytree(stored_and_plain[0], tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    del tensors[f"{EXPERTS}_{end}"]
    save_file(tensors | ({} if tensor is None else {f"{EXPERTS}_{end}": tensor}), broken / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        check_checkpoint(broken, load_model_config(broken))
    assert caught.value.field.startswith(EXPERTS)
