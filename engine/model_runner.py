"""Runs steps: lays a batch out, computes it, samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention import AttentionBackend, StepLayout
from engine.kv_pool import KVPool
from engine.layout import build_layout, order_items
from engine.llama import LlamaModel
from engine.logged_tokens import ItemLogprobs, LoggedTokens
from engine.logprobs import PromptRows, find_prompt_rows, prompt_logprobs, token_logprobs
from engine.model_config import LlamaConfig, load_model_config
from engine.sampler import Sampler
from engine.sequence import Sequence
from engine.torch_attention import TorchAttention
from engine.weights import LlamaWeights, load_weights
from kvcache.lease import StepBatch


class ModelRunner:
    """A model with its KV pool. It changes the pool only, never the sequences it is shown.

    Args:
        pool: In the dtype of the weights.
        backend: How attention is computed; torch operations unless given.
    """

    def __init__(
        self,
        config: LlamaConfig,
        weights: LlamaWeights,
        pool: KVPool,
        backend: AttentionBackend | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        self.config = config
        self.pool = pool
        self._model = LlamaModel(config, weights, self.max_model_len)
        self._backend = backend or TorchAttention()
        self._sampler = sampler or Sampler(config.eos_token_ids)

    @classmethod
    def from_dir(
        cls,
        model_dir: Path,
        *,
        dtype: torch.dtype,
        num_blocks: int,
        block_size: int,
    ) -> ModelRunner:
        """A runner of the checkpoint in ``model_dir`` with a pool of ``num_blocks`` blocks.

        Raises:
            InvalidValueError: a checkpoint that cannot be used; names it.
        """
        config = load_model_config(model_dir)
        weights = load_weights(model_dir, config, dtype)
        return cls(config, weights, KVPool(config, num_blocks=num_blocks, block_size=block_size, dtype=dtype))

    @property
    def max_model_len(self) -> int:
        """Tokens a sequence may reach: the model's context or the pool, whichever is smaller."""
        return min(self.config.max_position_embeddings, self.pool.num_slots)

    def execute(self, batch: StepBatch, sequences: Mapping[str, Sequence]) -> list[int | None]:
        """Runs a step and samples.

        Args:
            sequences: By request id; those of the batch at least.

        Returns:
            The new token of each of ``batch.items``, in their order; None where the item does not sample. They are
            ``LoggedTokens`` if log probabilities were asked for.

        Raises:
            IntegrityError: an item asks for tokens or blocks that are not there.
        """
        rows = self._run(batch, sequences)
        tokens: list[int | None] = [None] * len(batch.items)
        logprobs = self._prompt_logprobs(rows, batch, sequences) if rows.prompts else {}
        if rows.items:
            logprobs = self._sample(rows, batch, sequences, tokens, logprobs)
        return LoggedTokens(tokens, logprobs) if logprobs else tokens

    @torch.inference_mode()
    def _sample(
        self,
        rows: _SampledRows,
        batch: StepBatch,
        sequences: Mapping[str, Sequence],
        tokens: list[int | None],
        logprobs: dict[int, ItemLogprobs],
    ) -> dict[int, ItemLogprobs]:
        """Fills in ``tokens``; returns ``logprobs`` with those of the output added."""
        histories = [sequences[batch.items[i].request_id] for i in rows.items]
        params = [sequence.sampling for sequence in histories]
        positions = [batch.items[i].start + batch.items[i].num_tokens for i in rows.items]
        sampled = self._sampler.sample(rows.logits, params, positions, histories)
        for i, token in zip(rows.items, sampled, strict=True):
            tokens[i] = token
        logged = [row for row, param in enumerate(params) if param.logprobs is not None]
        if logged:
            chosen = rows.logits[torch.tensor(logged, device=rows.logits.device)]
            found = token_logprobs(
                chosen, [sampled[row] for row in logged], [params[row].logprobs or 0 for row in logged]
            )
            for row, each in zip(logged, found, strict=True):
                logprobs.setdefault(rows.items[row], ItemLogprobs()).output = each
        return logprobs

    @torch.inference_mode()
    def _prompt_logprobs(
        self, rows: _SampledRows, batch: StepBatch, sequences: Mapping[str, Sequence]
    ) -> dict[int, ItemLogprobs]:
        found = {}
        first = 0
        for part in rows.prompts:
            logits = rows.prompt_logits[first : first + part.num_rows]
            sequence = sequences[batch.items[part.item].request_id]
            found[part.item] = ItemLogprobs(prompt=prompt_logprobs(logits, part, sequence))
            first += part.num_rows
        return found

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
        prompts = find_prompt_rows(batch, order, sequences)
        if prompts:
            layout = _with_prompt_rows(layout, prompts)
        logits = self._model.forward(layout, self.pool, self._backend.begin_step(layout, self.pool))
        items = [i for i in order if batch.items[i].samples]
        return _SampledRows(items, logits[: len(items)], prompts, logits[len(items) :])


class _SampledRows(NamedTuple):
    """What a step has computed.

    Attributes:
        items: Row by row of ``logits``, the index of the item that it belongs to.
        logits: float32 ``[items, vocab]``.
        prompts: Rows wanted for the log probabilities of prompts.
        prompt_logits: float32 ``[rows, vocab]``, of one part of ``prompts`` after the other.
    """

    items: list[int]
    logits: Tensor
    prompts: list[PromptRows]
    prompt_logits: Tensor


def _with_prompt_rows(layout: StepLayout, prompts: list[PromptRows]) -> StepLayout:
    """The layout, its ``sample_rows`` followed by the rows of ``prompts``."""
    rows = [row for part in prompts for row in range(part.row, part.row + part.num_rows)]
    more = torch.tensor(rows, dtype=torch.int64, device=layout.sample_rows.device)
    return dataclasses.replace(layout, sample_rows=torch.cat([layout.sample_rows, more]))
