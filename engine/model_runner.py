"""Runs steps: lays a batch out, computes it, samples."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention import AttentionBackend
from engine.kv_pool import KVPool
from engine.layout import build_layout, order_items
from engine.model import DecoderModel
from engine.model_config import ModelConfig, load_model_config, resolve_max_model_len
from engine.sampler import Sampler
from engine.sequence import Sequence
from engine.torch_attention import TorchAttention
from engine.weights import ModelWeights, load_weights
from kvcache.lease import StepBatch


class ModelRunner:
    """A model with its KV pool. It changes the pool only, never the sequences it is shown.

    Args:
        pool: In the dtype of the weights.
        backend: How attention is computed; torch operations unless given.
        context_len: Tokens a sequence may reach by what was asked for; 0 is the model's own context.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        pool: KVPool,
        backend: AttentionBackend | None = None,
        sampler: Sampler | None = None,
        *,
        context_len: int = 0,
    ) -> None:
        self.config = config
        self.pool = pool
        self._context_len = resolve_max_model_len(config, context_len)
        self._model = DecoderModel(config, weights, self.max_model_len)
        self._backend = backend or TorchAttention(config.sliding_windows)
        self._sampler = sampler or Sampler()

    @classmethod
    def from_dir(
        cls,
        model_dir: Path,
        *,
        dtype: torch.dtype,
        num_blocks: int,
        block_size: int,
        context_len: int = 0,
    ) -> ModelRunner:
        """A runner of the checkpoint in ``model_dir`` with a pool of ``num_blocks`` blocks.

        Raises:
            InvalidValueError: a checkpoint that cannot be used; names it.
        """
        config = load_model_config(model_dir)
        weights = load_weights(model_dir, config, dtype)
        pool = KVPool(config, num_blocks=num_blocks, block_size=block_size, dtype=dtype)
        return cls(config, weights, pool, context_len=context_len)

    @property
    def max_model_len(self) -> int:
        """Tokens a sequence may reach: the context or the pool, whichever is smaller."""
        return min(self._context_len, self.pool.num_slots)

    def execute(self, batch: StepBatch, sequences: Mapping[str, Sequence]) -> list[int | None]:
        """Runs a step and samples.

        Args:
            sequences: By request id; those of the batch at least.

        Returns:
            The new token of each of ``batch.items``, in their order; None where the item does not sample.

        Raises:
            IntegrityError: an item asks for tokens or blocks that are not there.
        """
        rows = self._run(batch, sequences)
        tokens: list[int | None] = [None] * len(batch.items)
        if rows.items:
            params = [sequences[batch.items[i].request_id].sampling for i in rows.items]
            positions = [batch.items[i].start + batch.items[i].num_tokens for i in rows.items]
            with torch.inference_mode():
                sampled = self._sampler.sample(rows.logits, params, positions)
            for i, token in zip(rows.items, sampled, strict=True):
                tokens[i] = token
        return tokens

    def logits(self, batch: StepBatch, sequences: Mapping[str, Sequence]) -> list[Tensor | None]:
        """Runs a step; the logits (float32 ``[vocab]``) where ``execute`` gives a token."""
        rows = self._run(batch, sequences)
        by_item = dict(zip(rows.items, rows.logits, strict=True))
        return [by_item.get(i) for i in range(len(batch.items))]

    @torch.inference_mode()
    def _run(self, batch: StepBatch, sequences: Mapping[str, Sequence]) -> _SampledRows:
        order = order_items(batch)
        layout = build_layout(batch, order, sequences, self.pool.block_size)
        if len(layout.opened_blocks):
            self.pool.clear_blocks(layout.opened_blocks)
        logits = self._model.forward(layout, self.pool, self._backend.begin_step(layout, self.pool))
        return _SampledRows([i for i in order if batch.items[i].samples], logits)


class _SampledRows(NamedTuple):
    """Logits ``[R, vocab]`` and, row by row, the index of the item that they belong to."""

    items: list[int]
    logits: Tensor
