"""Our own kernels of attention on CPU tensors, in Triton's interpreter, against the torch backend.

``test_triton_attention.py`` runs them, the small ones by day.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from farsight.engine.attention.attention import PLAIN_SCORES, ScoreShape, StaticDecode, alibi_slopes
from farsight.engine.attention.triton_attention import TritonAttention
from tests.unit.engine.attention.paged_step import PagedStep


def backend(
    step: PagedStep,
    window: int | None = None,
    scores: ScoreShape = PLAIN_SCORES,
    least_part: int = 64,
    *,
    sinks: bool = False,
) -> TritonAttention:
    return TritonAttention(step.query.shape[1], [window], step.pool, 2, scores, sinks=sinks, least_part=least_part)


def attended(step: PagedStep, attention: TritonAttention, sinks: Tensor | None = None) -> Tensor:
    return attention.begin_step(step.layout, step.pool).attend(0, step.query, step.key, step.value, sinks)


def near(found: Tensor, expected: Tensor) -> None:
    atol = 3e-5 if found.dtype is torch.float32 else 2e-3
    torch.testing.assert_close(found.float(), expected, atol=atol, rtol=0)


def test_small_rows_in_parts_and_chunks_behind_prefixes() -> None:
    """Three heads share keys; pages are half full."""
    step = PagedStep([200, 64, 1], [(5, 70)], 3, 1, dtype=torch.float32)
    near(attended(step, backend(step)), step.expected())


def test_small_windows_caps_and_sinks() -> None:
    """Heads whose size is no power of two, in pages that tiles do not fit in."""
    step = PagedStep([150, 3], [(20, 90)], 4, 1, dim=80, page=48, dtype=torch.float32)
    scores, sinks = ScoreShape(scale=0.2, cap=3.0), torch.randn(4)
    near(
        attended(step, backend(step, 37, scores, 32, sinks=True), sinks),
        step.expected(37, scores, sinks),
    )


def test_programs_share_the_heads_of_a_wide_row() -> None:
    step = PagedStep([150, 3], [(5, 70)], 32, 1, dim=272, dtype=torch.float32)
    near(attended(step, backend(step)), step.expected())


def test_small_sums_have_one_order_in_any_batch() -> None:
    """A row alone, and the same between longer and shorter ones with a chunk beside it: the same bits."""
    step = PagedStep([301, 190, 7], [(5, 70)], 2, 1)
    attention = backend(step)
    whole = attended(step, attention)
    assert step.layout.decode is not None
    tables, lens = step.layout.decode.block_tables, step.layout.decode.kv_lens
    for row in range(3):
        static = StaticDecode(tables[row : row + 1].int(), torch.tensor(lens[row : row + 1], dtype=torch.int32))
        alone = attention.begin_static(static, step.pool)
        here = slice(row, row + 1)
        assert torch.equal(alone.attend(0, step.query[here], step.key[here], step.value[here]), whole[here])


def test_the_same_memory_with_other_values() -> None:
    """What a recorded step reads is changed in place; what it holds of lengths is nothing."""
    static = StaticDecode(torch.zeros(4, 4, dtype=torch.int32), torch.ones(4, dtype=torch.int32))
    for lengths in ([130, 70, 64, 1], [200, 199, 3, 2]):
        step = PagedStep(lengths, [], 4, 2)
        attention = backend(step).begin_static(static, step.pool)
        assert step.layout.decode is not None
        tables = step.layout.decode.block_tables
        static.block_tables[:, : tables.shape[1]] = tables
        static.kv_lens.copy_(torch.tensor(lengths))
        near(attention.attend(0, step.query, step.key, step.value), step.expected())


def test_small_recorded_steps_with_chunks() -> None:
    """Room for more rows and chunks than there are: the same bits as a step of just these."""
    rows, width, blocks = 7, 5, 9
    ints = torch.zeros(rows + blocks * 4 + rows * width, dtype=torch.int32)
    lens, chunks, tables = ints.split([rows, blocks * 4, rows * width])
    static = StaticDecode(tables.view(rows, width), lens, chunks.view(blocks, 4))
    for decode, prefill in (([200, 64, 1], [(5, 70), (33, 33)]), ([], [(9, 130)]), ([90], [])):
        step = PagedStep(decode, prefill, 3, 1)
        attention = backend(step)
        recorded = attention.begin_static(static, step.pool)
        expected = attended(step, attention)
        ints.zero_()
        lens[: len(decode)] = torch.tensor(decode)
        for part, first in ((step.layout.decode, 0), (step.layout.prefill, len(decode))):
            if part is not None:
                used = part.block_tables
                static.block_tables[first : first + len(used), : used.shape[1]] = used
        if prefill:
            lens_of, ends = (tuple(each) for each in zip(*prefill, strict=True))
            cut = attention.cut_chunks(lens_of, ends, len(decode), len(decode))
            chunks[: cut.size] = torch.from_numpy(cut.ravel())
        padded = (torch.cat([each, each[:1].expand(20, -1, -1)]) for each in (step.query, step.key, step.value))
        assert torch.equal(recorded.attend(0, *padded)[: len(expected)], expected)


@pytest.mark.parametrize("seed", range(200))
def test_random_layouts(seed: int) -> None:
    """Groups, sizes of heads and pages, lengths, prefixes, windows and scores of any kind."""
    rng = random.Random(seed)
    kv_heads = rng.choice((1, 1, 2))
    heads = kv_heads * rng.randint(1, 16)
    decode = [rng.randint(1, 300) for _ in range(rng.randint(0, 3))]
    chunk_lens = [rng.randint(2, 40) for _ in range(rng.randint(0 if decode else 1, 2))]
    chunks = [(length, length + rng.choice((0, 1, rng.randint(2, 150)))) for length in chunk_lens]
    step = PagedStep(
        sorted(decode, reverse=True),
        chunks,
        heads,
        kv_heads,
        dim=rng.choice((16, 64, 80, 96, 128, 192, 256)),
        page=rng.choice((16, 48, 64, 128)),
        dtype=rng.choice((torch.float16, torch.float32)),
    )
    window = rng.choice((None, rng.randint(1, 100)))
    # No model has slopes and sinks: only without sinks do scores that all grow by the same come to the same.
    sloped, sunk = rng.choice(((False, False), (True, False), (False, True)))
    scores = ScoreShape(rng.choice((None, 0.3)), rng.choice((None, 20.0)), alibi_slopes(heads) if sloped else ())
    sinks = torch.randn(heads) if sunk else None
    attention = backend(step, window, scores, rng.choice((64, 128)), sinks=sunk)
    near(attended(step, attention, sinks), step.expected(window, scores, sinks))
