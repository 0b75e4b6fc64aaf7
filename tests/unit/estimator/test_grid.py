"""The grid stays within what the worker can do and leaves no kind of work out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from core.costs import attention_pairs
from estimator.grid import SMALLEST_CHUNK, StepLimits, StepShape, step_grid

USUAL = StepLimits(max_num_seqs=128, max_batch_tokens=1024, max_model_len=2048, block_size=32, num_blocks=8192)


def features(grid: list[StepShape]) -> np.ndarray:
    rows = []
    for shape in grid:
        new = sum(num for _, num in shape.chunks)
        pairs = sum(attention_pairs(num, start) for start, num in shape.chunks)
        rows.append((1, new, len(shape.contexts), sum(shape.contexts), pairs))
    return np.array(rows, dtype=float)


def test_what_is_worth_measuring() -> None:
    grid = step_grid(USUAL)
    assert len(grid) == len(set(grid)) and 50 <= len(grid) <= 150
    assert StepShape(chunks=((0, 1024),)) in grid and StepShape(chunks=((1024, 1024),)) in grid
    assert StepShape(contexts=(SMALLEST_CHUNK,)) in grid and StepShape(contexts=(2047,) * 128) in grid
    assert any(shape.chunks and shape.contexts for shape in grid)
    found = features(grid)
    assert np.linalg.matrix_rank(found / found.max(axis=0)) == 5, "every price can be told from the others"


@pytest.mark.parametrize(
    "limits",
    [
        USUAL,
        replace(USUAL, num_blocks=70),
        replace(USUAL, max_batch_tokens=16),
        replace(USUAL, max_num_seqs=1),
        replace(USUAL, max_num_seqs=5, max_model_len=33, block_size=1),
        StepLimits(1, SMALLEST_CHUNK, SMALLEST_CHUNK, 1, SMALLEST_CHUNK),
    ],
)
def test_no_step_is_more_than_the_worker_can_do(limits: StepLimits) -> None:
    grid = step_grid(limits)
    assert grid
    for shape in grid:
        assert 1 <= len(shape.ends) <= limits.max_num_seqs
        assert max(shape.ends) <= limits.max_model_len
        assert all(num >= 2 and start >= 0 for start, num in shape.chunks)
        assert sum(num for _, num in shape.chunks) + len(shape.contexts) <= limits.max_batch_tokens
        assert sum(-(-end // limits.block_size) for end in shape.ends) <= limits.num_blocks
