"""Runs steps: computes a batch, samples."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from engine.backends import StepBackend, make_backend
from engine.kv_pool import KVPool
from engine.layout import order_items
from engine.model_config import ModelConfig, load_model_config, resolve_max_model_len
from engine.sampler import Sampler
from engine.sequence import Sequence
from engine.weights import load_weights
from kvcache.lease import StepBatch


class ModelRunner:
    """A model with its KV pool. It changes the pool only, never the sequences it is shown.

    Args:
        pool: In the dtype of the weights.
        backend: Computes the steps over the pool.
        max_model_len: Tokens a sequence may reach.
    """

    def __init__(
        self,
        config: ModelConfig,
        pool: KVPool,
        backend: StepBackend,
        max_model_len: int,
        sampler: Sampler | None = None,
    ) -> None:
        self.config = config
        self.pool = pool
        self.backend = backend
        self.max_model_len = max_model_len
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
        backend: str = "auto",
    ) -> ModelRunner:
        """A runner of the checkpoint in ``model_dir`` with a pool of ``num_blocks`` blocks.

        Args:
            context_len: Tokens a sequence may reach by what was asked for, if the pool holds them; 0 is the model's
                own context.
            backend: As in ``make_backend``.

        Raises:
            InvalidValueError: a checkpoint that cannot be used; names it.
        """
        config = load_model_config(model_dir)
        weights = load_weights(model_dir, config, dtype)
        pool = KVPool(config, num_blocks=num_blocks, block_size=block_size, dtype=dtype)
        max_model_len = min(resolve_max_model_len(config, context_len), pool.num_slots)
        return cls(config, pool, make_backend(backend, config, weights, pool, max_model_len), max_model_len)

    def execute(self, batch: StepBatch, sequences: Mapping[str, Sequence]) -> list[int | None]:
        """Runs a step and samples.

        Args:
            sequences: By request id; those of the batch at least.

        Returns:
            The new token of each of ``batch.items``, in their order; None where the item does not sample.

        Raises:
            IntegrityError: an item asks for tokens or blocks that are not there.
        """
        order = order_items(batch)
        step = self.backend.run(batch, order, sequences)
        sampled = [i for i in order if batch.items[i].samples]
        tokens: list[int | None] = [None] * len(batch.items)
        if sampled:
            params = [sequences[batch.items[i].request_id].sampling for i in sampled]
            positions = [batch.items[i].start + batch.items[i].num_tokens for i in sampled]
            with torch.inference_mode():
                chosen = self._sampler.sample(step.logits, params, positions, step.best)
            for i, token in zip(sampled, chosen, strict=True):
                tokens[i] = token
        return tokens

    def logits(self, batch: StepBatch, sequences: Mapping[str, Sequence]) -> list[Tensor | None]:
        """Runs a step; the logits (float32 ``[vocab]``) where ``execute`` gives a token."""
        order = order_items(batch)
        rows = iter(self.backend.run(batch, order, sequences).logits.clone())
        by_item = {i: next(rows) for i in order if batch.items[i].samples}
        return [by_item.get(i) for i in range(len(batch.items))]
