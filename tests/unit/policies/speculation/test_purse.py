"""What guessing may lose."""

from __future__ import annotations

import pytest

from policies.speculation.purse import ALLOWANCE, FULL, OWN_FULL, RESERVE_FULL, Purse

PRICE = 0.25
LOOK = 0.05


def rich() -> Purse:
    """After a long run of right guesses."""
    purse = Purse()
    for _ in range(100):
        purse.win("a copy", 16, 1)
    return purse


def lost_by_wrong_guesses(purse: Purse, num_tokens: int) -> float:
    """Tokens that guesses cost over so many steps of one sequence, each of another request."""
    lost = 0.0
    for number in range(num_tokens):
        purse.earn(1)
        num_guesses = purse.most_guesses(str(number), PRICE)
        if purse.common < PRICE:
            continue
        purse.pay(str(number), num_guesses * PRICE)
        purse.pay_look(LOOK, barren=not num_guesses)
        lost += num_guesses * PRICE + LOOK
    return lost


def test_wrong_guesses_lose_the_common_purse_and_the_allowance() -> None:
    assert lost_by_wrong_guesses(Purse(), 1000) <= FULL + 1000 * ALLOWANCE + LOOK
    assert lost_by_wrong_guesses(Purse(), 1000) >= 1000 * ALLOWANCE


def test_after_a_change_of_task_they_lose_one_reserve_more() -> None:
    lost = lost_by_wrong_guesses(rich(), 1000)
    assert lost <= (1 + RESERVE_FULL) * FULL + 1000 * ALLOWANCE + LOOK


def test_looks_that_find_nothing_empty_the_reserve_before_they_have_spent_it() -> None:
    purse = rich()
    lost = 0.0
    for _ in range(1000):
        purse.earn(1)
        if purse.common >= PRICE:
            purse.pay_look(LOOK, barren=True)
            lost += LOOK
    assert lost <= FULL + 1000 * ALLOWANCE + LOOK + 0.1 * RESERVE_FULL * FULL


def test_a_request_pays_from_what_it_has_won_first() -> None:
    purse = Purse()
    purse.win("a", 3, 1)
    assert purse.common == FULL, "it was full"
    assert purse.left("a") == FULL + 3
    assert purse.left("b") == FULL
    purse.pay("a", 2.0)
    assert (purse.common, purse.left("a")) == (FULL, FULL + 1)
    purse.pay("a", 1.5)
    assert (purse.common, purse.left("a")) == (FULL - 0.5, FULL - 0.5)
    assert not purse.owners


def test_what_is_won_fills_the_common_purse_first_and_no_purse_beyond_its_limit() -> None:
    purse = Purse()
    purse.pay("b", 1.0)
    purse.win("a", 1, 1)
    assert (purse.common, list(purse.owners)) == (FULL, [])
    purse.win("a", 1000, 1)
    assert purse.left("a") == FULL + OWN_FULL
    purse.keep({"b"})
    assert purse.left("a") == FULL


def test_a_reserve_fills_the_common_purse_faster() -> None:
    poor, purse = Purse(), rich()
    for each in (poor, purse):
        each.pay("x", FULL)
        assert each.common == 0
    assert purse.steps_until(0.3, 1) < 2
    assert poor.steps_until(0.3, 1) == pytest.approx(0.3 / ALLOWANCE, abs=1)
    purse.earn(1)
    assert purse.common == pytest.approx(0.3 + ALLOWANCE)


def test_the_steps_until_are_of_the_sequences_in_flight_and_end_where_the_purse_is_full() -> None:
    purse = Purse()
    purse.pay("x", FULL)
    num = purse.steps_until(99.0, 8)
    assert num == int(purse.full(8) / (8 * ALLOWANCE))
    purse.earn(8, num + 1)
    assert purse.common == pytest.approx(purse.full(8))
    assert purse.steps_until(99.0, 8) == 0
