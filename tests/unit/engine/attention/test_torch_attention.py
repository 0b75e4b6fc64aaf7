"""Attention out of torch operations in little memory: the same numbers, and no large tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from farsight.engine.attention.attention import PLAIN_SCORES, ScoreShape, StaticDecode
from farsight.engine.attention.torch_attention import Bound, TorchAttention
from tests.unit.engine.attention.paged_step import PagedStep

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 16, 8
LONGEST = 120
"""Tokens of the longest sequence, whose keys and values are gathered at once in any case."""


class Largest(TorchDispatchMode):
    """Notes how many elements the largest tensor has that an operation yields."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not func.is_view:  # of the pool, for one
            self.elements = max(
                self.elements, *(each.numel() for each in tree_leaves(made) if isinstance(each, Tensor))
            )
        return made


def attended(step: PagedStep, attention: TorchAttention, sinks: Tensor | None) -> tuple[list[Tensor], int]:
    """What rows and chunks see, and the rows alone as a recorded step; and the largest tensor."""
    assert step.layout.decode is not None
    lens = torch.tensor(step.layout.decode.kv_lens, dtype=torch.int32)
    static = StaticDecode(step.layout.decode.block_tables.int(), lens)
    query, key, value = step.query, step.key, step.value
    rows = slice(0, len(lens))
    with Largest() as largest:
        found = [
            attention.begin_step(step.layout, step.exact).attend(0, query, key, value, sinks),
            attention.begin_static(static, step.exact).attend(0, query[rows], key[rows], value[rows], sinks),
        ]
    return found, largest.elements


@pytest.mark.parametrize(
    ("window", "scores", "has_sinks"),
    [(None, PLAIN_SCORES, False), (9, ScoreShape(cap=3.0), True)],
    ids=["plain", "everything"],
)
def test_bounded_memory(window: int | None, scores: ScoreShape, has_sinks: bool) -> None:
    step = PagedStep([LONGEST, 119, 118, 117, 30, 29, 1], [(90, 110), (100, 100)], HEADS, KV_HEADS, DIM, PAGE)
    step.query, step.key, step.value = step.query.float(), step.key.float(), step.value.float()
    sinks = torch.randn(HEADS) if has_sinks else None
    bound = Bound(blocks=2 * LONGEST // PAGE, scores=10 * LONGEST)
    expected, most = attended(step, TorchAttention([window], scores), sinks)
    found, largest = attended(step, TorchAttention([window], scores, bound), sinks)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    limit = max(bound.blocks * PAGE * KV_HEADS * DIM, bound.scores * HEADS, step.query.numel())
    assert largest <= limit < most
