"""How often steps are looked at for guesses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from policies.speculation.pace import MOST_PAUSE, LookPace
from policies.speculation.price import StepPrice

LOOK = 0.05
"""What a look costs, in steps."""


def looks(pace: LookPace, num_steps: int, book: Callable[[int], None]) -> int:
    """So many steps; ``book`` gets the number of each look. Returns how many there were."""
    num = 0
    for _ in range(num_steps):
        if not pace.rests():
            book(num)
            num += 1
    return num


def test_while_no_guess_is_found_looks_become_rare_and_do_not_stop() -> None:
    pace = LookPace()
    looks(pace, 10_000, lambda _: pace.barren(-LOOK))
    assert looks(pace, 64 * (MOST_PAUSE + 1), lambda _: pace.barren(-LOOK)) == 64


@pytest.mark.parametrize("wrong", [2, 5])
def test_looks_that_cost_more_than_their_rare_right_guesses_bring_become_rare(wrong: int) -> None:
    """One look in so many brings half a step, the others find something and are wrong."""
    pace = LookPace()

    def book(number: int) -> None:
        pace.drafted(0.5 if number % (wrong + 1) == 0 else -0.3)

    looks(pace, 5_000, book)
    assert looks(pace, 1_000, book) < 60


def test_a_copy_that_has_begun_is_followed_however_bad_the_balance_was() -> None:
    pace = LookPace()
    looks(pace, 5_000, lambda _: pace.barren(-LOOK))
    looks(pace, MOST_PAUSE + 1, lambda _: pace.drafted(3.0))
    assert looks(pace, 30, lambda _: pace.drafted(3.0)) == 30
    assert pace.num_barren == 0, "the balance is good again, and all sequences are looked at"


def test_one_long_copy_does_not_pay_for_a_thousand_looks() -> None:
    pace = LookPace()
    pace.drafted(1e6)
    assert looks(pace, 10_000, lambda _: pace.drafted(-0.3)) < 400


def test_gain_is_what_right_guesses_save_less_what_all_and_the_look_cost() -> None:
    price = StepPrice()
    assert price.gain(4, 8, 8, 0.001) == 0, "nothing is known of such steps"
    price.add(4, 0, 0.010)
    for _ in range(400):
        price.add(4, 4, 0.012)  # a row takes 0.5 ms, a token of the four 2.5 ms
        price.add(4, 0, 0.010)
    assert price.gain(4, 4, 3, 0.0005) == pytest.approx((3 - 0.2 * 4) / 4 - 0.05, abs=0.02)
    assert price.gain(4, 0, 0, 0.0005) == pytest.approx(-0.05)
