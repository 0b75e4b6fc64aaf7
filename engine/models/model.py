"""The forward pass of a decoder over the flattened tokens of a step.

Written against plain tensors: at batch 32 a small model spends most of a step on operator calls, so there are as
few of them as the arithmetic allows. Numerics follow transformers' models of the same architectures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from farsight.engine.attention.attention import StepAttention, StepLayout
from farsight.engine.checkpoint.model_config import DecoderConfig
from farsight.engine.checkpoint.quantized import QuantizedLinear
from farsight.engine.checkpoint.weights import AllInputWeights, LayerWeights, ModelWeights, Norm
from farsight.engine.kv_pool import KVPool
from farsight.engine.models.layers import DecoderLayers, linear, normalised
from farsight.engine.models.mixed import MixedLayers


class DecoderModel:
    """A model ready to run.

    Args:
        max_len: Longest sequence to be run, in tokens; the rotary tables are made for it.
        compiled: Let torch compile the operations between two attentions, once for all layers.
    """

    def __init__(self, config: DecoderConfig, weights: ModelWeights, max_len: int, *, compiled: bool = False) -> None:
        self.config = config
        self.weights = weights
        self._layers = make_layers(config, weights.layers, max_len, weights.embedding, compiled=compiled)

    @property
    def recordable(self) -> bool:
        """Whether the work of a step depends on its size alone."""
        return self._layers.recordable

    def cut_off_at(self, instant_s: float) -> None:
        """Sets the instant of ``time.monotonic`` after which no further layer begins: ``IterationCutOff`` is raised."""
        self._layers.cut_off_at_s = instant_s

    def forward(self, layout: StepLayout, pool: KVPool, attention: StepAttention) -> Tensor:
        """Runs a step: writes its keys and values into the pool.

        Returns:
            Logits of ``layout.sample_rows``, float32 ``[R, vocab]``.
        """
        return self.logits(self.rows(layout, pool, attention))

    def rows(self, layout: StepLayout, pool: KVPool, attention: StepAttention) -> Tensor:
        """Runs a step up to the last norm; ``layout.sample_rows`` of what it reads, ``[R, hidden]``."""
        return self.rows_and_middle(layout, pool, attention)[0]

    def rows_and_middle(
        self, layout: StepLayout, pool: KVPool, attention: StepAttention, *, keeps_middle: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Returns ``rows``, and the same rows behind half of the layers if they are wanted, float32 ``[R, hidden]``."""
        weights = self.weights
        hidden = embed(layout, weights.embedding, weights.positions, self.config, weights.embedding_norm)
        if weights.inputs is not None:
            self._layers.inputs = layer_inputs(layout, hidden, weights.inputs, self.config)
        if layout.given is not None:
            hidden.index_copy_(0, layout.given.rows, layout.given.values.to(hidden.dtype))
        self._layers.middle_rows = layout.sample_rows if keeps_middle else None
        hidden = self._layers.run(hidden, layout, pool, attention)
        return hidden.index_select(0, layout.sample_rows), self._layers.middle

    def logits(self, rows: Tensor) -> Tensor:
        """Returns logits of what ``rows`` returned, float32 ``[R, vocab]``."""
        weights = self.weights
        return output_logits(rows, self.config, weights.norm, weights.lm_head, weights.head_bias)


def embedding_scale(config: DecoderConfig, dtype: torch.dtype) -> float:
    """Returns the factor of the embeddings of a model in ``dtype``."""
    return float(torch.tensor(config.blocks.embedding_scale, dtype=dtype))


def embed(
    layout: StepLayout, embedding: Tensor, positions: Tensor | None, config: DecoderConfig, norm: Norm | None
) -> Tensor:
    """Returns the step's tokens as the first layer reads them, ``[T, hidden]``.

    Args:
        norm: What they go through, if anything.
    """
    hidden = F.embedding(layout.token_ids, embedding)
    if positions is not None:
        hidden += positions.index_select(0, layout.positions)
    scale = embedding_scale(config, hidden.dtype)
    if scale != 1:
        hidden *= scale
    return hidden if norm is None else normalised(hidden, norm, config)


def layer_inputs(layout: StepLayout, hidden: Tensor, weights: AllInputWeights, config: DecoderConfig) -> Tensor:
    """Returns what each layer gets of each token beside the residual stream, ``[T, layers, inputs]``.

    Args:
        hidden: The embeddings, ``[T, hidden]``.
    """
    width = config.blocks.layer_inputs
    own = F.embedding(layout.token_ids, weights.embedding) * float(torch.tensor(math.sqrt(width), dtype=hidden.dtype))
    made = linear(hidden, weights.projection) * config.hidden_size**-0.5
    made = F.rms_norm(made.view(len(hidden), -1, width), (width,), None, config.norm_eps) * weights.norm
    return (made.to(hidden.dtype) + own.view_as(made)) * 2**-0.5


def last_hidden(rows: Tensor, config: DecoderConfig, norm: Norm | None) -> Tensor:
    """Returns hidden states behind the last norm, float32 ``[R, hidden]``, of rows behind the last layer."""
    if norm is None:
        return rows.float()
    like = norm.weight if norm.weight.dtype == rows.dtype else norm.weight.to(rows.dtype)
    shown = Norm(like, None if norm.bias is None else norm.bias.to(rows.dtype))
    return normalised(rows, shown, config).float()


def output_logits(
    rows: Tensor,
    config: DecoderConfig,
    norm: Norm | None,
    lm_head: Tensor | QuantizedLinear,
    head_bias: Tensor | None = None,
) -> Tensor:
    """Returns logits of rows behind the last layer, float32 ``[R, outputs of lm_head]``."""
    if norm is not None:
        rows = normalised(rows, norm, config)
    weight = lm_head if isinstance(lm_head, Tensor) else lm_head.dense(rows.dtype)
    logits = F.linear(rows, weight, head_bias).float()
    if config.blocks.logit_scale != 1:
        logits *= config.blocks.logit_scale
    cap = config.blocks.logit_cap
    return logits if cap is None else torch.tanh(logits / cap).mul_(cap)


def make_layers(
    config: DecoderConfig, layers: Sequence[LayerWeights], max_len: int, like: Tensor, *, compiled: bool
) -> DecoderLayers:
    """Makes the layers of a whole model, in the fastest way for the device of ``like``; see ``DecoderLayers``."""
    if config.shapes is not None:
        return MixedLayers(config, layers, max_len, like)
    if like.device.type == "cuda" and not compiled:
        from farsight.engine.models.fused_layers import FusedLayers  # needs Triton, which torch for CUDA brings

        return FusedLayers(config, layers, max_len, like)
    return DecoderLayers(config, layers, max_len, like, compiled=compiled)
