"""Speculation: what prompt lookup guesses, what a guess costs by the durations of steps, and what guessing may lose."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from farsight.policies.speculation.base import SPECULATIONS, SpeculationContext
from farsight.policies.speculation.ngram import MAX_DRAFTS, MOST_WAIT, NgramDrafter, NgramSpeculation
from farsight.policies.speculation.price import (
    ALLOWANCE,
    FULL,
    LEAST_PRICE,
    OWN_FULL,
    PLAIN_EVERY,
    RESERVE_FULL,
    GuessBudget,
    StepPrice,
)

CHEAP = 0.1


def drafter() -> NgramDrafter:
    speculation = SPECULATIONS.find("ngram").build(SpeculationContext())
    assert isinstance(speculation, NgramSpeculation)
    return speculation.open()


def ids(text: str) -> list[int]:
    return list(map(ord, text))


def decode(prompt: str, answer: str, price: float = CHEAP, each: NgramDrafter | None = None) -> tuple[int, int]:
    """Decodes ``answer`` with guesses; returns the steps that it took, and the guesses that were wrong."""
    each = each or drafter()
    known, end = ids(prompt), ids(prompt + answer)
    steps = wrong = 0
    while len(known) < len(end):
        guess = list(each.draft(known, price))
        right = 0
        while right < len(guess) and len(known) + right < len(end) and guess[right] == end[len(known) + right]:
            right += 1
        wrong += len(guess) - right
        known = end[: len(known) + right + 1]
        steps += 1
    return steps, wrong


TEXT = "the quick brown fox jumps over a lazy dog while nine men pack my box with jugs"


def test_the_tokens_after_an_earlier_match_are_the_guess() -> None:
    assert drafter().draft(ids("abcdefgh|abcd"), CHEAP)[:4] == ids("efgh")
    for known in (ids("abcdefgh"), [5], []):
        assert drafter().draft(known, CHEAP) == ()
    big = [0x110000 + n for n in range(10)]
    assert list(drafter().draft([*big, 7, *big[:4]], CHEAP))[:3] == big[4:7], "beyond Unicode as well"


def test_a_list_of_words_is_an_edit_that_repeats() -> None:
    """Each blank has become a new line and a hyphen: known from the first, guessed from the second on."""
    answer = "- " + TEXT.replace(" ", "\n- ")
    steps, _ = decode(TEXT + "|", answer)
    assert steps < len(answer) / 4


@pytest.mark.parametrize(
    "changed",
    [TEXT.replace("brown ", ""), TEXT.replace("brown", "brown and red"), TEXT.replace("brown", "BROWN")],
    ids=["deleted", "inserted", "replaced"],
)
def test_a_copy_goes_on_behind_an_edit(changed: str) -> None:
    assert decode(TEXT + "|", changed)[0] < len(changed) / 3


def test_an_output_that_repeats_itself_is_guessed() -> None:
    assert decode("", "abc" * 40)[0] < 30
    assert decode("x", "-" * 100)[0] < 30


def test_a_higher_price_guesses_less_and_one_of_a_whole_token_nothing() -> None:
    known = ids("abcdefghijklmnopqrstuvwxyz|abcd")
    lengths = [len(drafter().draft(known, price)) for price in (0.03, 0.3, 0.6, 1.0)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == MAX_DRAFTS
    assert lengths[-1] == 0


def test_what_does_not_repeat_costs_few_guesses() -> None:
    """Bytes at random: short matches occur, and are soon known to mean nothing."""
    rng = random.Random(0)
    noise = "".join(chr(97 + rng.randrange(20)) for _ in range(2000))
    speculation = NgramSpeculation()
    steps, wrong = decode(noise[:200], noise[200:], 0.2, speculation.open())
    assert steps > 1700
    assert wrong < 150
    assert decode(noise[:200][::-1], noise[200:600][::-1], 0.2, speculation.open())[1] < 20, "others know already"


def test_a_request_that_guesses_in_vain_is_looked_at_less_often() -> None:
    each = drafter()
    looked = 0
    for num in range(1, 400):
        known = list(range(num))
        before = len(each._text)
        assert each.draft(known, CHEAP) == ()
        looked += len(each._text) > before
    assert looked < 400 / MOST_WAIT + 2 * MOST_WAIT


def test_guesses_are_tokens_of_the_request_whatever_happens() -> None:
    """No sequence of tokens and prices leads to an error or to a token that did not occur."""
    rng = random.Random(3)
    for seed in range(60):
        each, known = drafter(), [rng.randrange(4) for _ in range(rng.randrange(30))]
        alphabet = 3 + seed % 5
        for _ in range(150):
            guess: Sequence[int] = each.draft(known, rng.choice((0.03, 0.3, 0.7)))
            assert len(guess) <= MAX_DRAFTS
            assert set(guess) <= set(known)
            taken = rng.randint(0, len(guess))
            known = [*known, *guess[:taken], rng.randrange(alphabet)]


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


PRICE = 0.25
LOOK = 0.05


def rich() -> GuessBudget:
    """After a long run of right guesses."""
    budget = GuessBudget()
    for _ in range(100):
        budget.win("a copy", 16, 1)
    return budget


def lost_by_wrong_guesses(budget: GuessBudget, num_tokens: int) -> float:
    """Tokens that guesses cost over so many steps of one sequence, each of another request."""
    lost = 0.0
    for number in range(num_tokens):
        budget.earn(1)
        num_guesses = budget.most_guesses(str(number), PRICE)
        if budget.common < PRICE:
            continue
        budget.pay(str(number), num_guesses * PRICE)
        budget.pay_look(LOOK, barren=not num_guesses)
        lost += num_guesses * PRICE + LOOK
    return lost


def test_wrong_guesses_lose_the_common_budget_and_the_allowance() -> None:
    assert lost_by_wrong_guesses(GuessBudget(), 1000) <= FULL + 1000 * ALLOWANCE + LOOK
    assert lost_by_wrong_guesses(GuessBudget(), 1000) >= 1000 * ALLOWANCE
    most = (1 + RESERVE_FULL) * FULL + 1000 * ALLOWANCE + LOOK
    assert lost_by_wrong_guesses(rich(), 1000) <= most, "after a change of task one reserve more"


def test_looks_that_find_nothing_empty_the_reserve_before_they_have_spent_it() -> None:
    budget = rich()
    lost = 0.0
    for _ in range(1000):
        budget.earn(1)
        if budget.common >= PRICE:
            budget.pay_look(LOOK, barren=True)
            lost += LOOK
    assert lost <= FULL + 1000 * ALLOWANCE + LOOK + 0.1 * RESERVE_FULL * FULL


def test_a_request_pays_from_what_it_has_won_first() -> None:
    budget = GuessBudget()
    budget.win("a", 3, 1)
    assert budget.common == FULL, "it was full"
    assert budget.left("a") == FULL + 3
    assert budget.left("b") == FULL
    budget.pay("a", 2.0)
    assert (budget.common, budget.left("a")) == (FULL, FULL + 1)
    budget.pay("a", 1.5)
    assert (budget.common, budget.left("a")) == (FULL - 0.5, FULL - 0.5)
    assert not budget.owners


def test_what_is_won_fills_the_common_budget_first_and_no_budget_beyond_its_limit() -> None:
    budget = GuessBudget()
    budget.pay("b", 1.0)
    budget.win("a", 1, 1)
    assert (budget.common, list(budget.owners)) == (FULL, [])
    budget.win("a", 1000, 1)
    assert budget.left("a") == FULL + OWN_FULL
    budget.keep({"b"})
    assert budget.left("a") == FULL


def test_a_reserve_fills_the_common_budget_faster() -> None:
    poor, budget = GuessBudget(), rich()
    for each in (poor, budget):
        each.pay("x", FULL)
        assert each.common == 0
    assert budget.steps_until(0.3, 1) < 2
    assert poor.steps_until(0.3, 1) == pytest.approx(0.3 / ALLOWANCE, abs=1)
    budget.earn(1)
    assert budget.common == pytest.approx(0.3 + ALLOWANCE)


def test_the_steps_until_are_of_the_sequences_in_flight_and_end_where_the_budget_is_full() -> None:
    budget = GuessBudget()
    budget.pay("x", FULL)
    num = budget.steps_until(99.0, 8)
    assert num == int(budget.full(8) / (8 * ALLOWANCE))
    budget.earn(8, num + 1)
    assert budget.common == pytest.approx(budget.full(8))
    assert budget.steps_until(99.0, 8) == 0
