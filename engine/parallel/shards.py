"""One rank's part of a checkpoint: a rank reads only the parts of tensors that it uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farsight.engine.checkpoint.families.record import Experts, TensorNames
from farsight.engine.checkpoint.sources import open_checkpoint, threads_for
from farsight.engine.checkpoint.weights import Allocation, LayerWeights, Norm
from farsight.engine.parallel.mesh import Part


@dataclass(frozen=True, slots=True)
class StageWeights:
    """The weights of one rank; as in ``ModelWeights``, with None for those of other stages.

    Attributes:
        lm_head: ``[rows of the vocabulary, hidden]``: this column's rows.
        head_bias: ``[rows of the vocabulary]``, where the model has one.
    """

    embedding: Tensor | None
    positions: Tensor | None
    layers: tuple[LayerWeights, ...]
    norm: Norm | None
    lm_head: Tensor | None
    head_bias: Tensor | None = None
    embedding_norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class _Cut:
    """The part of a tensor that a rank has: ranges along one dimension, one after the other."""

    dim: int
    ranges: tuple[range, ...]


def load_shard(model_dir: Path, part: Part, dtype: torch.dtype, device: str = "cpu") -> StageWeights:
    """Reads one rank's part; quantised matrices become floats.

    Raises:
        CheckpointError: As in ``load_weights``; tensors of other ranks must be there as well, but are not read.
    """
    allocation = Allocation(part.config, dtype, device, part.layers.start, experts=part.experts)
    weights, cuts = _allocate(allocation, part), _cuts(allocation, part)
    source = open_checkpoint(model_dir, part.whole, device)
    for name in source.names():
        for target, cut in _wanted(name, allocation, weights, part, cuts):
            with threads_for(target.numel()):
                _fill(target, source.rows(name), cut)
    allocation.finish()
    return weights


def _allocate(allocation: Allocation, part: Part) -> StageWeights:
    config = part.whole
    embedding = allocation.embedding() if part.is_first else None
    lm_head = None
    if part.is_last and config.tie_word_embeddings and embedding is not None:
        lm_head = embedding[part.vocab.start : part.vocab.stop]
    elif part.is_last:
        lm_head = allocation.tensor(f"{allocation.names.lm_head}.weight", len(part.vocab), config.hidden_size)
    head_bias = None
    if part.is_last and config.biases.head:
        head_bias = allocation.tensor(f"{allocation.names.lm_head}.bias", len(part.vocab))
    return StageWeights(
        embedding=embedding,
        positions=allocation.positions() if part.is_first else None,
        layers=allocation.layers(),
        norm=allocation.final_norm() if part.is_last else None,
        lm_head=lm_head,
        head_bias=head_bias,
        embedding_norm=allocation.embedding_norm() if part.is_first else None,
    )


def _wanted(
    name: str, allocation: Allocation, weights: StageWeights, part: Part, cuts: dict[str, _Cut]
) -> list[tuple[Tensor, _Cut | None]]:
    """Returns the target of a checkpoint's tensor, and the part of the tensor that goes there; None for all of it."""
    wanted = []
    if name in allocation.targets:
        wanted.append((allocation.targets[name], cuts.get(name)))
    head_is_apart = weights.lm_head is not None and weights.embedding is None
    head = f"{allocation.names.lm_head}.weight"
    if name == f"{allocation.names.embedding}.weight" and part.whole.tie_word_embeddings and head_is_apart:
        wanted.append((allocation.targets[head], cuts[head]))
    return wanted


def _cuts(allocation: Allocation, part: Part) -> dict[str, _Cut]:
    """Returns the parts of tensors that are not whole, by the checkpoint's names."""
    names = allocation.names
    cuts = {f"{names.lm_head}.{kind}": _Cut(0, (part.vocab,)) for kind in ("weight", "bias")}
    if part.mesh.tensor == 1:
        return cuts
    for index in part.layers:
        prefix = names.layer(index)
        cuts |= _attention_cuts(prefix, names, part)
        experts = part.whole.mixture(index)
        if experts is None:
            cuts |= _mlp_cuts(prefix, names.up, names.down, part.inner, part.whole.intermediate_size, part)
            continue
        shared = experts.shared_inner
        if shared:
            cuts |= _mlp_cuts(prefix, names.shared_up, names.shared_down, part.shared_inner, shared, part)
        cuts |= _expert_cuts(prefix, names, experts, part)
    return cuts


def _attention_cuts(prefix: str, names: TensorNames, part: Part) -> dict[str, _Cut]:
    config = part.whole
    query = _scaled(part.heads, config.head_dim)
    kv = _scaled(part.kv_heads, config.head_dim)
    kv_size = config.num_key_value_heads * config.head_dim
    sizes = [config.num_attention_heads * config.head_dim, kv_size, kv_size]
    cuts = _row_cuts(prefix, names.qkv, [query, kv, kv], sizes) | _column_cuts(prefix + names.out, query, part)
    return cuts | ({prefix + names.sinks: _Cut(0, (part.heads,))} if config.blocks.sinks else {})


def _mlp_cuts(prefix: str, up: Sequence[str], down: str, own: range, inner: int, part: Part) -> dict[str, _Cut]:
    """Returns parts of the tensors of an MLP of width ``inner``, of which this rank has ``own``."""
    num_up = part.whole.up_size // part.whole.intermediate_size
    return _row_cuts(prefix, up, [own] * num_up, [inner] * num_up) | _column_cuts(prefix + down, own, part)


def _expert_cuts(prefix: str, names: TensorNames, experts: Experts, part: Part) -> dict[str, _Cut]:
    """Returns a share of each expert; or, of tensors that hold all experts, those that are here."""
    if "{}" not in names.expert_down:
        tensors = [name + end for name in (*names.expert_up, names.expert_down) for end in names.expert_ends]
        return {prefix + name: _Cut(0, (part.experts,)) for name in tensors}
    cuts: dict[str, _Cut] = {}
    if not part.mesh.whole_experts:
        for i in part.experts:
            up, down = [name.format(i) for name in names.expert_up], names.expert_down.format(i)
            cuts |= _mlp_cuts(prefix, up, down, part.expert_inner, experts.inner, part)
    return cuts


def _column_cuts(name: str, columns: range, part: Part) -> dict[str, _Cut]:
    """Returns parts of the tensors of a layer whose inputs are split."""
    cuts = {f"{name}.weight": _Cut(1, (columns,))}
    if part.column > 0:  # a bias is added once: elsewhere it is zero
        cuts[f"{name}.bias"] = _Cut(0, ())
    return cuts


def _row_cuts(prefix: str, names: Sequence[str], shares: list[range], sizes: list[int]) -> dict[str, _Cut]:
    """Returns parts of layers whose outputs are split; the checkpoint holds them in one tensor or in several."""
    parts: list[tuple[range, ...]] = [(share,) for share in shares]
    if len(names) == 1:
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        moved = (range(start + share.start, start + share.stop) for start, share in zip(starts, shares, strict=True))
        parts = [tuple(moved)]
    return {
        f"{prefix}{name}.{kind}": _Cut(0, ranges)
        for name, ranges in zip(names, parts, strict=True)
        for kind in ("weight", "bias")
    }


def _scaled(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)


def _fill(target: Tensor, source: Any, cut: _Cut | None) -> None:
    """Copies the cut's part of ``source``, which is sliced like a tensor; writes zeros if the part is empty."""
    if cut is None:
        target.copy_(source[:])
    elif not cut.ranges:
        target.zero_()
    else:
        first = 0
        for part in cut.ranges:
            window = target.narrow(cut.dim, first, len(part))
            columns = slice(part.start, part.stop)
            window.copy_(source[columns] if cut.dim == 0 else source[:, columns])
            first += len(part)
