"""Attention of one layer over a pool full of NaN but for the sequences of a step, and what torch makes of it."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.common.stand_in_gpu import PoolShape
from farsight.engine.attention.attention import PLAIN_SCORES, DecodePart, PrefillPart, ScoreShape, StepLayout
from farsight.engine.attention.torch_attention import TorchAttention
from farsight.engine.kv_pool import KVPool

PAGE = 64


class PagedStep:
    """The pool, and the step.

    Args:
        decode: Tokens that each decode row attends over.
        chunks: The tokens of each prefill chunk, and those of its sequence up to its end.
        dtype: That of the pool; torch computes in float32.
    """

    def __init__(
        self,
        decode: list[int],
        chunks: list[tuple[int, int]],
        heads: int,
        kv_heads: int,
        dim: int = 32,
        page: int = PAGE,
        dtype: torch.dtype = torch.float16,
    ) -> None:
        torch.manual_seed(0)
        kv_lens = [*decode, *(kv_len for _, kv_len in chunks)]
        num_blocks = sum(-(-kv_len // page) for kv_len in kv_lens)
        free = torch.randperm(num_blocks).tolist()
        tables = [[free.pop() for _ in range(-(-kv_len // page))] for kv_len in kv_lens]
        slots = [
            torch.tensor([table[i // page] * page + i % page for i in range(kv_len)])
            for table, kv_len in zip(tables, kv_lens, strict=True)
        ]
        self.pool = _make_pool(PoolShape(dim, kv_heads), num_blocks, page, dtype, float("nan"))
        self.exact = _make_pool(PoolShape(dim, kv_heads), num_blocks, page, torch.float32, 0.0)
        for cache, exact in ((self.pool.keys[0], self.exact.keys[0]), (self.pool.values[0], self.exact.values[0])):
            for held in slots:
                cache[held] = torch.randn(len(held), kv_heads, dim).to(dtype)
                exact[held] = cache[held].float()
        num_new = [1] * len(decode) + [chunk_len for chunk_len, _ in chunks]
        own = torch.cat([held[len(held) - new :] for held, new in zip(slots, num_new, strict=True)])
        self.query = torch.randn(len(own), heads, dim).to(dtype)
        self.key, self.value = self.pool.keys[0][own], self.pool.values[0][own]
        none = torch.empty(0, dtype=torch.int64)
        first = len(decode)
        self.layout = StepLayout(
            token_ids=none,
            positions=none,
            slot_ids=own,
            opened_blocks=none,
            sample_rows=none,
            decode=DecodePart(_table(tables[:first]), tuple(decode)) if decode else None,
            prefill=PrefillPart(_table(tables[first:]), *(tuple(part) for part in zip(*chunks, strict=True)))
            if chunks
            else None,
        )

    def expected(
        self, window: int | None = None, scores: ScoreShape = PLAIN_SCORES, sinks: Tensor | None = None
    ) -> Tensor:
        """What torch computes in float32, ``[T, heads * head_dim]``."""
        attention = TorchAttention([window], scores).begin_step(self.layout, self.exact)
        return attention.attend(0, self.query.float(), self.key.float(), self.value.float(), sinks)


def _make_pool(shape: PoolShape, num_blocks: int, page: int, dtype: torch.dtype, value: float) -> KVPool:
    pool = KVPool(shape, num_blocks=num_blocks, block_size=page, dtype=dtype)  # type: ignore[arg-type]
    for cache in (*pool.keys, *pool.values):
        cache.fill_(value)
    return pool


def _table(tables: list[list[int]]) -> Tensor:
    width = max(map(len, tables), default=0)
    return torch.tensor([table + table[:1] * (width - len(table)) for table in tables])
