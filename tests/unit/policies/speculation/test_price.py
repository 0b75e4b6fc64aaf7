"""The price of a guess from the durations of steps."""

from __future__ import annotations

import math
import random

import pytest

from policies.speculation.price import LEAST_PRICE, PLAIN_EVERY, StepPrice

STEP_S = 0.010


def run(price: StepPrice, num_seqs: int, row_share: float, num_steps: int, guesses: float = 2.0, seed: int = 0) -> None:
    """Steps that take ``STEP_S``, and a row its share of that; one in twenty is held up."""
    rng = random.Random(seed)
    for _ in range(num_steps):
        drafts = 0 if price.ratio(num_seqs) == math.inf else round(guesses * num_seqs)
        duration_s = STEP_S * (1 + row_share * drafts / num_seqs) * rng.uniform(0.95, 1.05)
        price.add(num_seqs, drafts, duration_s * (40 if rng.random() < 0.05 else 1))


@pytest.mark.parametrize("row_share", [0.1, 0.3, 0.8, 1.1])
@pytest.mark.parametrize("guesses", [1.0, 5.0])
def test_it_finds_what_a_row_costs_though_steps_are_held_up(row_share: float, guesses: float) -> None:
    price = StepPrice()
    run(price, 8, row_share, 200, guesses)
    assert price.ratio(8) == pytest.approx(row_share, abs=0.15)


def test_a_size_of_step_is_measured_without_guesses_first_and_again_from_time_to_time() -> None:
    price = StepPrice()
    assert price.ratio(4) == math.inf
    price.add(4, 0, STEP_S)
    for _ in range(PLAIN_EVERY):
        assert price.ratio(4) < math.inf
        price.add(4, 8, STEP_S)
    assert price.ratio(4) == math.inf
    price.add(4, 0, STEP_S)
    assert price.ratio(4) == LEAST_PRICE
    assert price.ratio(5) == math.inf, "another size, another line"


def test_sizes_of_steps_have_their_own_prices() -> None:
    price = StepPrice()
    run(price, 1, 0.1, 100)
    run(price, 32, 0.9, 100)
    price.add(1, 0, STEP_S)
    price.add(32, 0, STEP_S)
    assert price.ratio(1) < 0.2
    assert price.ratio(32) > 0.7


def test_a_price_too_high_for_any_guess_falls_until_it_is_measured_again() -> None:
    price = StepPrice()
    run(price, 8, 1.2, 200)
    for _ in range(120):
        price.add(8, 0, STEP_S)
    assert price.ratio(8) < 0.5
    run(price, 8, 1.2, 12)
    assert price.ratio(8) > 0.6, "and soon found again"


def test_a_bad_beginning_is_made_up_for() -> None:
    """The first steps, with and without guesses, are held up twenty times as long as they take."""
    price = StepPrice()
    price.add(1, 0, 20 * STEP_S)
    for _ in range(20):
        price.add(1, 4, 40 * STEP_S)
    for _ in range(100):
        price.add(1, 0, STEP_S)
    assert price.ratio(1) < 0.5


def test_steps_without_a_duration_tell_nothing() -> None:
    price = StepPrice()
    price.add(1, 0, 0.0)
    assert price.ratio(1) == math.inf
