"""What batches of pictures take is learned from them."""

from __future__ import annotations

import random

import pytest

from actors.vision.encoding_cost import EncodingCost
from actors.worker.step_loop import FIRST_STEPS_S, MOST_TIMES


def truth_s(tokens: list[int]) -> float:
    """A tower that takes 5 ms a batch, 0.1 ms a token, and 50 ns a pair."""
    return 5e-3 + 1e-4 * sum(tokens) + 5e-8 * sum(each * each for each in tokens)


def test_the_terms_of_a_tower_are_found() -> None:
    cost, rng = EncodingCost(60.0), random.Random(3)
    assert cost.batch_s([100]) is None
    assert cost.bound_s([100]) == FIRST_STEPS_S
    for _ in range(400):
        tokens = [rng.randrange(4, 2000) for _ in range(rng.randrange(1, 9))]
        cost.add(tokens, truth_s(tokens) * rng.uniform(0.9, 1.1))
    assert cost.coefficients() == pytest.approx((5e-3, 1e-4, 5e-8), rel=0.2)
    assert cost.batch_s([1000, 300]) == pytest.approx(truth_s([1000, 300]), rel=0.05)
    assert cost.bound_s([1000]) == pytest.approx(60.0 + MOST_TIMES * truth_s([1000]), rel=0.05)
