"""The rows of a step whose hidden states requests ask for that generate nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from core.errors import IntegrityError
from engine.pooled_rows import PooledRows
from engine.sequence import Sequence
from kvcache import StepBatch


class RowsToPool(NamedTuple):
    """Consecutive rows of a step that belong to one vector.

    Attributes:
        item: Index in the batch.
        row: The first row in the step.
        num_rows: Number of rows.
    """

    item: int
    row: int
    num_rows: int


def find_rows_to_pool(batch: StepBatch, order: list[int], sequences: Mapping[str, Sequence]) -> list[RowsToPool]:
    """The rows of a step, its items in ``order``, of vectors that are not known yet.

    Raises:
        IntegrityError: Positions of a mean were never computed here.
    """
    found = []
    row = 0
    for i in order:
        item = batch.items[i]
        sequence = sequences[item.request_id]
        if sequence.sampling.pooling == "mean":
            known = 0 if sequence.pooled is None else sequence.pooled.num_rows
            if item.start > known:
                raise IntegrityError(f"{item.request_id}: hidden states up to token {known}, not {item.start}")
            count = item.start + item.num_tokens - known
            if count > 0:
                found.append(RowsToPool(i, row + known - item.start, count))
        elif sequence.sampling.pooling and item.samples:
            found.append(RowsToPool(i, row + item.num_tokens - 1, 1))
        row += item.num_tokens
    return found


@torch.inference_mode()
def pool_rows(hidden: Tensor, places: Mapping[int, int], found: list[RowsToPool]) -> dict[int, PooledRows]:
    """By index of the item.

    Args:
        hidden: float32 ``[R, hidden]``.
        places: The row of ``hidden`` of each row of the step.
    """
    pooled = {}
    for part in found:
        first = places[part.row]
        total = hidden[first : first + part.num_rows].sum(0)
        pooled[part.item] = PooledRows(part.num_rows, total.cpu().numpy())
    return pooled
