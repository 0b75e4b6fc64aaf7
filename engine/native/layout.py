"""From the batch of a step to the arrays that the compiled step reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from engine.attention.layout import fill_rows, find_sample_rows
from engine.sequence import Sequence
from kvcache import StepBatch, StepItem


@dataclass(frozen=True, slots=True)
class NativeStep:
    """One step of ``T`` rows, item by item.

    Attributes:
        rows: int64 ``[3, T]``: token ids, positions, slots of the pool.
        lengths: int32 ``[items, 2]``: tokens computed, and tokens of the sequence with them.
        tables: int32 ``[items, width]``: blocks of the sequence; the rest is arbitrary.
        sample_rows: int64 ``[R]``, ascending.
    """

    rows: np.ndarray
    lengths: np.ndarray
    tables: np.ndarray
    sample_rows: np.ndarray


def build_native_step(
    batch: StepBatch,
    order: list[int],
    sequences: Mapping[str, Sequence],
    block_size: int,
    more_rows: list[int] | None = None,
) -> NativeStep:
    """The arrays of a step, its items in ``order`` (from ``order_items``).

    Args:
        more_rows: Further rows whose logits are wanted, beside those that sample.

    Raises:
        IntegrityError: an item asks for tokens or blocks that are not there.
    """
    items = [batch.items[i] for i in order]
    return NativeStep(
        rows=fill_rows(items, sequences, block_size),
        lengths=np.array([(item.num_tokens, item.start + item.num_tokens) for item in items], dtype=np.int32),
        tables=_tables(items),
        sample_rows=np.array(find_sample_rows(items, more_rows), dtype=np.int64),
    )


def _tables(items: list[StepItem]) -> np.ndarray:
    tables = np.empty((len(items), max(len(item.blocks) for item in items)), dtype=np.int32)
    for row, item in zip(tables, items, strict=True):
        row[: len(item.blocks)] = item.blocks
    return tables
