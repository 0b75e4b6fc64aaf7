"""Counts that grow with a sequence are those of all its tokens."""

from __future__ import annotations

import random
from collections import Counter

from engine.token_counts import TokenCounts


def contents(counts: TokenCounts) -> dict[int, int]:
    return dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))


def expected(token_ids: list[int], prompt_len: int) -> dict[int, int]:
    return {**dict.fromkeys(token_ids[:prompt_len], 0), **Counter(token_ids[prompt_len:])}


def test_counts_that_grow_are_those_of_all_tokens() -> None:
    rng = random.Random(0)
    for prompt_len in (0, 1, 40):
        tokens = [rng.randrange(60) for _ in range(prompt_len + 200)]
        growing = TokenCounts(tokens[:prompt_len], prompt_len)
        for known in range(prompt_len, len(tokens), 3):
            growing.advance(tokens[:known])
            resumed = TokenCounts(tokens[:known], prompt_len)
            assert contents(growing) == contents(resumed) == expected(tokens[:known], prompt_len)


def test_guesses_are_counted_apart() -> None:
    counts = TokenCounts([1, 2, 2, 3], 2)
    assert contents(counts.plus((3, 9, 9))) == {1: 0, 2: 1, 3: 2, 9: 2}
    assert contents(counts) == {1: 0, 2: 1, 3: 1}
    counts.advance([1, 2, 2, 3, 1])
    assert contents(counts) == {1: 1, 2: 1, 3: 1}
