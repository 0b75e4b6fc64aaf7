"""Checkpoints: whole, in shards, and broken in ways that must be named; small tensors are read by one thread."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from farsight.core.errors import InvalidValueError
from farsight.engine.checkpoint import sources
from farsight.engine.checkpoint.dtypes import parse_dtype
from farsight.engine.checkpoint.model_config import load_model_config
from farsight.engine.checkpoint.names import num_parameters
from farsight.engine.checkpoint.sources import SMALL, threads_for
from farsight.engine.checkpoint.weights import CheckpointError, Linear, ModelWeights, load_weights
from farsight.engine.kv_pool import KVPool
from farsight.engine.models import quantize
from tests.unit.engine.families.shapes import FAMILIES
from tests.unit.engine.small_models import SHAPES, save_model

FILE = "model.safetensors"


@pytest.fixture
def checkpoint(tiny_model_dir, tmp_path):
    """A copy of the tiny checkpoint and a function that rewrites its tensors."""
    out = shutil.copytree(tiny_model_dir, tmp_path / "copy")

    def change(**tensors: Tensor | None) -> None:
        held = load_file(out / FILE) | {name.replace("__", "."): t for name, t in tensors.items()}
        save_file({name: tensor for name, tensor in held.items() if tensor is not None}, out / FILE)

    return out, change


def load(path: Path, dtype: torch.dtype = torch.float32) -> ModelWeights:
    return load_weights(path, load_model_config(path), dtype)


def test_names_without_the_head(model_dir, tmp_path):
    """As checkpoints of the model alone have them, OPT's of old among them."""
    shutil.copytree(model_dir("opt"), tmp_path, dirs_exist_ok=True)
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(tmp_path / FILE).items()}
    save_file(tensors, tmp_path / FILE)
    assert all(torch.equal(*each) for each in zip(flat(load(tmp_path)), flat(load(model_dir("opt"))), strict=True))


def flat(value: object) -> list[Tensor]:
    """Every tensor of a dataclass of weights."""
    if isinstance(value, Tensor):
        return [value]
    if not dataclasses.is_dataclass(value) and not isinstance(value, tuple):
        return []
    parts = value if isinstance(value, tuple) else [getattr(value, f.name) for f in dataclasses.fields(value)]
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
    assert {tensor.dtype for tensor in flat(weights)} == {torch.bfloat16}


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


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_a_large_tensor_has_all_threads_and_a_small_one_a_single_one() -> None:
    for num_values, expected in ((SMALL, 1), (SMALL + 1, 3)):
        with threads_for(num_values):
            assert torch.get_num_threads() == expected
        assert torch.get_num_threads() == 3
    with pytest.raises(RuntimeError), threads_for(1):
        raise RuntimeError
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_threads")
def test_experts_are_read_and_rounded_by_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = save_model(tmp_path, **FAMILIES["qwen3 moe"])
    seen: list[int] = []
    fill, nibbles = sources._SafetensorsSource.fill, quantize._nibbles

    def watched_fill(self: sources._SafetensorsSource, name: str, target: Tensor) -> None:
        seen.append(torch.get_num_threads())
        fill(self, name, target)

    def watched_nibbles(groups: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(torch.get_num_threads())
        return nibbles(groups)

    monkeypatch.setattr(sources._SafetensorsSource, "fill", watched_fill)
    monkeypatch.setattr(quantize, "_nibbles", watched_nibbles)
    load_weights(model_dir, load_model_config(model_dir), torch.float32)
    assert len(seen) > 30
    quantize.quantize_linear(Linear(torch.randn(64, 32), None), 4)
    assert set(seen) == {1}
    assert torch.get_num_threads() == 3
