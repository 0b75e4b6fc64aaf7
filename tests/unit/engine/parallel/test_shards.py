"""Which part of a model a rank has, and that it reads no more of the checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.config.engine import EngineConfig
from core.errors import ConfigError
from engine.checkpoint.model_config import DecoderConfig, load_model_config
from engine.checkpoint.weights import CheckpointError, LayerWeights, Linear, Matrix, load_weights
from engine.parallel.memory import free_bytes, run_largest_step
from engine.parallel.mesh import Mesh, Part, check_parallel
from engine.parallel.shards import StageWeights, load_shard
from engine.parallel.wire import StepOrder, pack_order, unpack_order
from kvcache import KVCopy, StepItem
from tests.unit.engine.small_models import SHAPES


def shards(directory: Path, mesh: Mesh) -> tuple[list[Part], list[StageWeights]]:
    config = load_model_config(directory)
    parts = [Part(config, mesh, rank) for rank in range(mesh.size)]
    return parts, [load_shard(directory, part, torch.float32) for part in parts]


def outputs(config: DecoderConfig, layer: LayerWeights, x: torch.Tensor) -> list[torch.Tensor]:
    """What each linear layer makes of ``x``: queries, keys, values, gate, up, cut apart."""

    def apply(linear: Matrix, sizes: list[int]) -> list[torch.Tensor]:
        assert isinstance(linear, Linear), "the checkpoint is not quantised"
        return list(torch.nn.functional.linear(x, linear.weight, linear.bias).split(sizes, -1))

    assert layer.up is not None, "the model has no experts"
    kv = config.num_key_value_heads * config.head_dim
    qkv = apply(layer.qkv, [config.num_attention_heads * config.head_dim, kv, kv])
    return qkv + apply(layer.up, [config.intermediate_size] * (config.up_size // config.intermediate_size))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("columns", [2, 4])
def test_the_columns_of_a_layer_make_up_the_whole(model_dir: Callable[[str], Path], shape: str, columns: int) -> None:
    directory = model_dir(shape)
    config = load_model_config(directory)
    whole = load_weights(directory, config, torch.float32)
    parts, weights = shards(directory, Mesh(columns, 2))
    x = torch.randn(3, config.hidden_size, generator=torch.Generator().manual_seed(1))
    for index, layer in enumerate(whole.layers):
        stage = [(part, own) for part, own in zip(parts, weights, strict=True) if index in part.layers]
        own_layers = [own.layers[index - part.layers.start] for part, own in stage]
        each = [outputs(part.config, own, x) for (part, _), own in zip(stage, own_layers, strict=True)]
        for i, expected in enumerate(outputs(config, layer, x)):
            copies = max(1, columns // config.num_key_value_heads) if i in (1, 2) else 1  # of keys and values
            torch.testing.assert_close(torch.cat([found[i] for found in each[::copies]], -1), expected)
        for name in ("out", "down"):  # their inputs are split, what they give is added up, a bias once
            linears = [getattr(own, name) for own in own_layers]
            assert torch.equal(torch.cat([each.weight for each in linears], 1), getattr(layer, name).weight)
            bias = getattr(layer, name).bias
            assert bias is None or torch.equal(sum(each.bias for each in linears), bias)
        first, *others = [each.input_norm for each in (layer, *own_layers)]
        assert first is not None
        assert all(norm is not None and torch.equal(norm.weight, first.weight) for norm in others)


@pytest.mark.parametrize("shape", ["gqa", "tied", "opt"])
@pytest.mark.parametrize("mesh", [Mesh(2, 1), Mesh(1, 2), Mesh(3, 1), Mesh(2, 2)], ids=str)
def test_the_vocabulary_is_split_over_the_last_stage(model_dir: Callable[[str], Path], shape: str, mesh: Mesh) -> None:
    directory = model_dir(shape)
    config = dataclasses.replace(load_model_config(directory))
    if config.num_attention_heads % mesh.tensor:
        with pytest.raises(ConfigError, match=r"tensor_parallel.*divisor of the model's 4 attention heads"):
            mesh.check(config)
        return
    whole = load_weights(directory, config, torch.float32)
    parts, weights = shards(directory, mesh)
    heads = [own.lm_head for part, own in zip(parts, weights, strict=True) if part.is_last]
    assert isinstance(whole.lm_head, torch.Tensor)
    assert torch.equal(torch.cat([head for head in heads if head is not None]), whole.lm_head)
    for part, own in zip(parts, weights, strict=True):
        assert (own.lm_head is not None, own.norm is not None) == (part.is_last, part.is_last)
        assert (own.embedding is not None) == part.is_first
        if own.embedding is not None:
            assert torch.equal(own.embedding, whole.embedding)


def test_ranks_and_places() -> None:
    mesh = Mesh(2, 3)
    places = [(mesh.stage_of(rank), mesh.column_of(rank)) for rank in range(6)]
    assert places == [(2, 0), (2, 1), (1, 0), (1, 1), (0, 0), (0, 1)]
    assert [mesh.rank_at(*place) for place in places] == list(range(6))


def test_layers_that_are_left_over_go_to_the_early_stages(model_dir: Callable[[str], Path]) -> None:
    config = load_model_config(model_dir("qwen3"))
    parts = [Part(config, Mesh(1, 2), rank) for rank in (1, 0)]
    assert [part.layers for part in parts] == [range(2), range(2, 3)]
    assert [part.config.sliding_windows for part in parts] == [(9, None), (9,)]


@pytest.mark.parametrize(
    ("shape", "mesh", "engine", "match"),
    [
        ("gqa", Mesh(3, 1), EngineConfig(), r"tensor_parallel: got 3, expected a divisor of the model's 4 attention"),
        ("gqa", Mesh(1, 3), EngineConfig(), r"pipeline_parallel: got 3, expected at most the model's 2 layers"),
        ("gqa", Mesh(2, 1), EngineConfig(device="emulated:a100-7b"), r"engine\.device.*a real device"),
        ("gqa", Mesh(2, 1), EngineConfig(backend="native"), r"engine\.backend.*auto, torch or xformers"),
    ],
)
def test_what_cannot_be_split_is_refused(
    model_dir: Callable[[str], Path], shape: str, mesh: Mesh, engine: EngineConfig, match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        check_parallel(mesh, load_model_config(model_dir(shape)), engine)


def test_heads_that_match_neither_way_are_refused(model_dir: Callable[[str], Path]) -> None:
    config = dataclasses.replace(load_model_config(model_dir("gqa")), num_attention_heads=12, num_key_value_heads=3)
    with pytest.raises(ConfigError, match="a divisor or a multiple of the model's 3 key-value heads"):
        Mesh(2, 1).check(config)
    odd = dataclasses.replace(load_model_config(model_dir("gqa")), intermediate_size=113)
    with pytest.raises(ConfigError, match="divisor of the model's intermediate size 113"):
        Mesh(2, 1).check(odd)


@pytest.mark.parametrize("change", ["missing", "shape", "unknown"])
def test_a_broken_checkpoint_is_refused_by_ranks_that_do_not_need_what_is_broken(
    model_dir: Callable[[str], Path], tmp_path: Path, change: str
) -> None:
    directory = model_dir("gqa")
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    if change == "missing":
        del tensors[name]
    elif change == "shape":
        tensors[name] = tensors[name][:-1].contiguous()
    else:
        name = "model.layers.7.mlp.up_proj.weight"
        tensors[name] = torch.zeros(2, 2)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    rank = 0 if change == "shape" else 1  # rank 1 has the first layer
    with pytest.raises(CheckpointError, match=name):
        load_shard(tmp_path, Part(load_model_config(tmp_path), Mesh(1, 2), rank), torch.float32)


def test_orders_cross_the_wire_unchanged() -> None:
    rows = torch.arange(12).view(3, 4).numpy()
    items = [StepItem("", 9, 1, True, [3, 1, 2]), StepItem("", 0, 3, False, [5])]
    read = unpack_order(pack_order(StepOrder(items, rows, [1, 2])))
    assert isinstance(read, StepOrder)
    assert (read.items, read.rows.tolist(), read.more_rows) == (items, rows.tolist(), [1, 2])
    for copy in (KVCopy(7, 1, (4, 5), (0, 9)), KVCopy(8, 0, (), ())):  # type: ignore[arg-type]
        assert unpack_order(pack_order(copy)) == copy


@pytest.mark.parametrize("rank", [0, 3])
def test_the_largest_step_runs_on_a_rank_alone(model_dir: Callable[[str], Path], rank: int) -> None:
    """What is measured of a GPU is free of everything but this; here it only has to run."""
    directory = model_dir("gqa")
    part = Part(load_model_config(directory), Mesh(2, 2), rank)
    weights = load_shard(directory, part, torch.float32)
    engine = EngineConfig(block_size=4, max_num_seqs=3, max_batch_tokens=40)
    run_largest_step(part, weights, engine)
    assert free_bytes(part, weights, engine, num_sharers=4) > 2 * free_bytes(part, weights, engine, num_sharers=16)
