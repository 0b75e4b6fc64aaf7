"""Checkpoints: whole, in shards, and broken in ways that must be named."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.errors import InvalidValueError
from engine.checkpoint.model_config import load_model_config
from engine.checkpoint.names import num_parameters
from engine.checkpoint.weights import CheckpointError, Linear, Matrix, ModelWeights, load_weights, parse_dtype
from engine.kv.kv_pool import KVPool
from tests.unit.engine.small_models import SHAPES, load_reference, save_model

FILE = "model.safetensors"


@pytest.fixture
def checkpoint(tiny_model_dir, tmp_path):
    """A copy of the tiny checkpoint and a function that rewrites its tensors."""
    out = shutil.copytree(tiny_model_dir, tmp_path / "copy")

    def change(**tensors: torch.Tensor | None) -> None:
        held = load_file(out / FILE) | {name.replace("__", "."): t for name, t in tensors.items()}
        save_file({name: tensor for name, tensor in held.items() if tensor is not None}, out / FILE)

    return out, change


def plain(linear: Matrix | None) -> Linear:
    assert isinstance(linear, Linear), "the checkpoint is not quantised"
    return linear


def tensor_of(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor


def load(path: Path, dtype: torch.dtype = torch.float32) -> ModelWeights:
    return load_weights(path, load_model_config(path), dtype)


def test_fused_tensors(tiny_model_dir):
    reference = load_reference(tiny_model_dir).model.layers[1]
    layer = load(tiny_model_dir).layers[1]
    attention, mlp = reference.self_attn, reference.mlp
    parts = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    assert torch.equal(plain(layer.qkv).weight, torch.cat(parts))
    assert torch.equal(plain(layer.up).weight, torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))


def test_tensors_that_are_fused_in_the_checkpoint(model_dir):
    reference = load_reference(model_dir("phi3")).model.layers[1]
    layer = load(model_dir("phi3")).layers[1]
    assert torch.equal(plain(layer.qkv).weight, reference.self_attn.qkv_proj.weight)
    assert torch.equal(plain(layer.up).weight, reference.mlp.gate_up_proj.weight)


def test_biases_are_fused_like_their_weights(model_dir):
    reference = load_reference(model_dir("biases")).model.layers[0]
    layer = load(model_dir("biases")).layers[0]
    attention, mlp = reference.self_attn, reference.mlp
    assert torch.equal(
        tensor_of(layer.qkv.bias), torch.cat([attention.q_proj.bias, attention.k_proj.bias, attention.v_proj.bias])
    )
    assert torch.equal(tensor_of(plain(layer.up).bias), torch.cat([mlp.gate_proj.bias, mlp.up_proj.bias]))
    assert torch.equal(tensor_of(layer.out.bias), attention.o_proj.bias)


def test_learned_positions_begin_at_position_0(model_dir):
    reference = load_reference(model_dir("opt")).model.decoder
    weights = load(model_dir("opt"))
    assert torch.equal(tensor_of(weights.positions), reference.embed_positions.weight[2:])
    assert weights.norm is not None
    assert torch.equal(tensor_of(weights.norm.bias), reference.final_layer_norm.bias)


def test_what_a_model_lacks_is_none(model_dir):
    llama, opt = load(model_dir("gqa")), load(model_dir("opt_gelu"))
    assert llama.norm is not None
    assert (llama.positions, llama.norm.bias, llama.layers[0].q_norm, llama.layers[0].qkv.bias) == (None,) * 4
    assert (opt.norm, opt.layers[0].k_norm, plain(opt.layers[0].down).bias) == (None,) * 3


def test_names_without_the_head(model_dir, tmp_path):
    """As checkpoints of the model alone have them, OPT's of old among them."""
    shutil.copytree(model_dir("opt"), tmp_path, dirs_exist_ok=True)
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(tmp_path / FILE).items()}
    save_file(tensors, tmp_path / FILE)
    assert torch.equal(tensor_of(load(tmp_path).positions), tensor_of(load(model_dir("opt")).positions))


def flat(value) -> list[torch.Tensor]:
    """Every tensor of a dataclass of weights."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value if isinstance(value, tuple) else () if value is None else [getattr(value, f) for f in value.__slots__]
    return [tensor for part in parts for tensor in flat(part)]


@pytest.mark.parametrize("shape", ["gqa", "qwen3", "phi3", "opt"])
def test_shards_hold_the_same(shape, model_dir, tmp_path):
    save_model(tmp_path, max_shard_size="100KB", **SHAPES[shape])
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    sharded, whole = flat(load(tmp_path)), flat(load(model_dir(shape)))
    assert len(whole) >= 15
    assert all(torch.equal(a, b) for a, b in zip(sharded, whole, strict=True))


def test_broken_shards_are_named(tmp_path):
    save_model(tmp_path, max_shard_size="100KB", **SHAPES["gqa"])
    shard = min(tmp_path.glob("model-*.safetensors"))
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        load(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weights": {}}))
    with pytest.raises(CheckpointError, match="weight_map"):
        load(tmp_path)


def test_progress_is_the_share_of_the_parameters(tiny_model_dir):
    told: list[float] = []
    config = load_model_config(tiny_model_dir)
    load_weights(tiny_model_dir, config, torch.float32, progress=told.append)
    assert told == sorted(told) and len(set(told)) == len(told) and told[-1] == 1.0
    rows = config.vocab_size * config.hidden_size / num_parameters(config)
    steps = [after - before for before, after in itertools.pairwise([0.0, *told])]
    assert max(steps) == pytest.approx(rows)  # the largest tensor


def test_dtype_is_converted(tiny_model_dir):
    weights = load(tiny_model_dir, torch.bfloat16)
    assert plain(weights.layers[0].down).weight.dtype == weights.embedding.dtype == torch.bfloat16
    assert isinstance(weights.lm_head, torch.Tensor)
    assert weights.lm_head.dtype == torch.bfloat16


def test_tied_embeddings_share_memory(model_dir):
    weights = load(model_dir("tied"))
    assert weights.lm_head is weights.embedding


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("lm_head.weight", None),
        ("model.layers.1.self_attn.k_proj.weight", None),
        ("model.layers.0.mlp.up_proj.weight", torch.zeros(3, 4)),
        ("model.norm.weight", torch.zeros(64, dtype=torch.int64)),
        ("model.layers.2.mlp.up_proj.weight", torch.zeros(3, 4)),
        ("model.layers.0.self_attn.q_proj.bias", torch.zeros(64)),
    ],
)
def test_odd_tensors_are_named(name, tensor, checkpoint):
    path, change = checkpoint
    change(**{name.replace(".", "__"): tensor})
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert caught.value.field == name


def test_tensors_that_carry_nothing_are_ignored(checkpoint):
    path, change = checkpoint
    change(model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(8))
    load(path)


def test_unreadable_files(checkpoint):
    path, _ = checkpoint
    (path / FILE).write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="readable safetensors"):
        load(path)
    (path / FILE).unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors or its index"):
        load(path)


def test_parse_dtype(tiny_model_dir, tmp_path):
    config = load_model_config(tiny_model_dir)
    assert parse_dtype("bfloat16", config) == torch.bfloat16
    assert parse_dtype("auto", config) == torch.float32
    large = {"architectures": ["LlamaForCausalLM"], "torch_dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(large))
    assert parse_dtype("auto", load_model_config(tmp_path)) == torch.float16
    with pytest.raises(InvalidValueError, match=r"dtype.*int8"):
        parse_dtype("int8", config)


def test_pool(tiny_model_dir):
    config = load_model_config(tiny_model_dir)
    pool = KVPool(config, num_blocks=6, block_size=4, dtype=torch.bfloat16)
    assert pool.keys[1].shape == (24, 2, 16)
    assert config.kv_bytes_per_token(torch.bfloat16) * 24 == pool.keys[0].nbytes * 4
    for cache in (*pool.keys, *pool.values):
        cache.fill_(1)
    pool.clear_blocks(torch.tensor([0, 5]))
    for cache in (*pool.keys, *pool.values):
        assert cache.flatten(1).sum(1).tolist() == [0.0] * 4 + [32.0] * 16 + [0.0] * 4
