"""The weights of a model as it is computed with: linear layers, norms, experts, latents; the order of stored rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from farsight.engine.checkpoint.families.mixers import DeltaNet
from farsight.engine.checkpoint.families.record import Latent, LayerShape
from farsight.engine.checkpoint.model_config import DecoderConfig
from farsight.engine.checkpoint.quantized import JoinedLinear, QuantizedLinear


@dataclass(frozen=True, slots=True)
class Linear:
    """``x @ weight.T + bias``; the weight is ``[out, in]``, the bias ``[out]``."""

    weight: Tensor
    bias: Tensor | None

    @property
    def outputs(self) -> int:
        """Outputs of the layer."""
        return len(self.weight)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Returns the weight in ``dtype``."""
        return self.weight.to(dtype)


Matrix = Linear | QuantizedLinear | JoinedLinear
"""A linear layer, in whatever form it is kept."""


@dataclass(frozen=True, slots=True)
class Norm:
    """Weight and bias, each ``[hidden]``."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class BesideWeights:
    """What experts beside an MLP have of their own.

    Attributes:
        router: ``[hidden]``: the weight of the norm that the router reads, of root mean square.
        scales: float32 ``[experts]``: factors of the experts' weights.
        before, after: Norms of the experts' input and of what they give.
        after_mlp: Norm of what the MLP gives.
    """

    router: Tensor
    scales: Tensor
    before: Norm
    after_mlp: Norm
    after: Norm


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The mixture of experts of a layer.

    Attributes:
        router: ``[experts, hidden]``, and a last row if the shared experts have a gate; never quantised.
        up, down: Those of each expert that is here, as of an MLP.
        correction: float32 ``[experts]``, added to the scores for the choice alone; None without.
        first: Number of the first expert that is here; 0 unless ranks share the experts.
        beside: None where experts take the place of an MLP.
    """

    router: Linear
    up: tuple[Matrix, ...]
    down: tuple[Matrix, ...]
    correction: Tensor | None = None
    first: int = 0
    beside: BesideWeights | None = None

    @property
    def here(self) -> range:
        """Numbers of the experts that are here."""
        return range(self.first, self.first + len(self.up))


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """What latent attention has beside the layer's first and last matrix.

    Attributes:
        q_norm: ``[q_rank]``, of what queries are made of; None where that is the layer's input.
        q_up: ``[heads * query, q_rank]``, the turned values of each head first; None likewise.
        kv_norm: ``[rank]``.
        keys: ``[heads, plain, rank]``; makes the keys of the latent.
        values: ``[heads, value, rank]``.
    """

    q_norm: Tensor | None
    q_up: Matrix | None
    kv_norm: Tensor
    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class MixerWeights:
    """What a layer with a state has beside its first and last matrix, all of it in float32.

    Attributes:
        taps: ``[length, channels]``, the factor of the oldest token first.
        bias: ``[channels]`` of the convolution; None without.
        rates: ``[value_heads]``: with the delta rule, minus the exponential of the stored logarithm; None without it.
        steps: ``[value_heads]``, added before the softplus; None likewise.
        norm: ``[value]``, of each head of what it gives; None likewise.
    """

    taps: Tensor
    bias: Tensor | None = None
    rates: Tensor | None = None
    steps: Tensor | None = None
    norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class InputWeights:
    """What a layer makes of the inputs that it alone gets of a token: ``[inputs, hidden]`` and ``[hidden, inputs]``."""

    gate: Matrix
    projection: Matrix
    norm: Norm


@dataclass(frozen=True, slots=True)
class AllInputWeights:
    """What gives each layer inputs of its own.

    Attributes:
        embedding: ``[vocab, layers * inputs]``.
        projection: ``[layers * inputs, hidden]``, of the embeddings.
        norm: ``[inputs]``, of each layer's part of the projection.
    """

    embedding: Tensor
    projection: Matrix
    norm: Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer.

    Attributes:
        qkv: ``[(heads + 2 * kv_heads) * head_dim, hidden]``: queries, then keys, then values. With latent attention:
            queries or their latent, then the token's row.
        input_norm: Before attention; None without.
        q_norm: ``[head_dim]``, of each head of the queries, or ``[heads * head_dim]``, of all; None without.
        k_norm: The same for the keys.
        post_norm: Before the MLP; that before attention where both read one.
        up: ``[2 * intermediate, hidden]``, gate, then up, where the MLP is gated; else ``[intermediate, hidden]``.
            A layer with experts has here those that every token takes, and None without.
        after_attention, after_mlp: For what they add to the residual stream; None without.
        experts: None in a layer with a plain MLP.
        latent: None without latent attention.
        sinks: ``[heads]``, scores that take part in the softmax; None without.
        mixer: In a layer with a state, whose first and last matrix are ``qkv`` and ``out``.
        inputs: None where the layer gets nothing beside the residual stream.
        scale: ``[1]``, a factor of the stream at the layer's end; None without.
    """

    input_norm: Norm | None
    qkv: Matrix
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Matrix
    post_norm: Norm | None
    up: Matrix | None
    down: Matrix | None
    after_attention: Norm | None = None
    after_mlp: Norm | None = None
    experts: ExpertWeights | None = None
    sinks: Tensor | None = None
    latent: LatentWeights | None = None
    mixer: MixerWeights | None = None
    inputs: InputWeights | None = None
    scale: Tensor | None = None

    @property
    def matrices(self) -> Iterator[Matrix]:
        """Every matrix that may be quantised."""
        yield from (each for each in (self.qkv, self.out, self.up, self.down) if each is not None)
        if self.latent is not None and self.latent.q_up is not None:
            yield self.latent.q_up
        if self.inputs is not None:
            yield from (self.inputs.gate, self.inputs.projection)
        if self.experts is not None:
            yield from (*self.experts.up, *self.experts.down)


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """The whole model.

    Attributes:
        embedding: ``[vocab, hidden]``.
        positions: ``[context, hidden]``, by position; None if positions are not learned.
        norm: Before ``lm_head``; None if there is none.
        lm_head: ``[vocab, hidden]``; ``embedding`` itself when they are tied and neither is quantised.
        head_bias: ``[vocab]``, or None.
        embedding_norm: Behind the embedding; None without.
        inputs: None where layers get nothing beside the residual stream.
    """

    embedding: Tensor
    positions: Tensor | None
    layers: tuple[LayerWeights, ...]
    norm: Norm | None
    lm_head: Tensor | QuantizedLinear
    head_bias: Tensor | None = None
    embedding_norm: Norm | None = None
    inputs: AllInputWeights | None = None

    @property
    def quantized_bits(self) -> tuple[int, ...]:
        """Which sizes of integers its matrices are held in, in ascending order; empty for floats alone."""
        matrices = (*(matrix for layer in self.layers for matrix in layer.matrices), self.lm_head)
        parts = (part for each in matrices for part in (each.parts if isinstance(each, JoinedLinear) else (each,)))
        return tuple(sorted({part.bits for part in parts if isinstance(part, QuantizedLinear)}))


def qkv_order(config: DecoderConfig) -> Tensor:
    """By output of ``LayerWeights.qkv``: the number of the stored output, int64.

    Products of queries and keys do not change when the values of both are moved alike: pairs that lie beside each
    other can be turned as halves.
    """
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    stored = torch.arange((heads + 2 * kv_heads) * head_dim)
    if config.names.grouped:
        groups = stored.view(kv_heads, heads // kv_heads + 2, head_dim)
        query, key, value = groups[:, :-2].reshape(-1), groups[:, -2].reshape(-1), groups[:, -1].reshape(-1)
    else:
        query, key, value = torch.split(stored, [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim])
    if config.names.interleaved:
        query, key = query[turned_order(config, heads)], key[turned_order(config, kv_heads)]
    return torch.cat([query, key, value])


def gated_order(heads: int, shape: LayerShape) -> Tensor:
    """Returns the same where each head of queries has its gate behind it: the gates of all heads come last."""
    queries = torch.arange(2 * heads * shape.head_dim).view(heads, 2, shape.head_dim)
    kv = 2 * heads * shape.head_dim + torch.arange(2 * shape.kv_heads * shape.head_dim)
    return torch.cat([queries[:, 0].flatten(), kv, queries[:, 1].flatten()])


def delta_order(mixer: DeltaNet) -> Tensor:
    """Returns the same for the first matrix of a delta rule whose rows lie by key head."""
    share, heads = mixer.value_heads // mixer.key_heads * mixer.value, mixer.key_heads
    sizes = [mixer.key, mixer.key, share, share]
    first = torch.split(torch.arange(heads * sum(sizes)).view(heads, -1), sizes, 1)
    ends = torch.arange(2 * mixer.value_heads).view(heads, 2, -1) + heads * sum(sizes)
    return torch.cat([*(part.flatten() for part in first), ends[:, 0].flatten(), ends[:, 1].flatten()])


def turned_order(config: DecoderConfig, heads: int) -> Tensor:
    """Returns the same for values of so many heads: those that are turned, by halves, then the rest."""
    turned = config.rotary.rotary_dim if config.rotary else 0
    values = torch.arange(heads * config.head_dim).view(heads, config.head_dim)
    halves = values[:, :turned].view(heads, -1, 2).transpose(1, 2).flatten(1)
    return torch.cat([halves, values[:, turned:]], 1).flatten()


def latent_orders(latent: Latent, heads: int) -> tuple[Tensor, Tensor]:
    """By row of the queries, and by value of a token's row: the number of the stored one. Turned values are first."""
    halves = torch.arange(latent.turned).view(-1, 2).t().flatten()
    head = torch.cat([latent.plain + halves, torch.arange(latent.plain)])
    query = (torch.arange(heads)[:, None] * latent.query + head).flatten()
    return query, torch.cat([latent.rank + halves, torch.arange(latent.rank)])
