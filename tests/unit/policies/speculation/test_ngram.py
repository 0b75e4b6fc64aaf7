"""What prompt lookup guesses, and when it is worth it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from policies.speculation.base import SPECULATIONS, SpeculationContext
from policies.speculation.ngram import MAX_DRAFTS, MOST_WAIT, NgramDrafter, NgramSpeculation

CHEAP = 0.1


def drafter() -> NgramDrafter:
    return NgramSpeculation().open()


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


def test_nothing_is_guessed_where_nothing_matches() -> None:
    assert drafter().draft(ids("abcdefgh"), CHEAP) == ()
    assert drafter().draft([5], CHEAP) == ()
    assert drafter().draft([], CHEAP) == ()


def test_a_copy_takes_few_steps() -> None:
    steps, wrong = decode(TEXT + "|", TEXT)
    assert steps < len(TEXT) / 5
    assert wrong < len(TEXT) / 2


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


def test_tokens_beyond_unicode_are_only_guessed_wrongly() -> None:
    big = [0x110000 + n for n in range(10)]
    assert list(drafter().draft([*big, 7, *big[:4]], CHEAP))[:3] == big[4:7]


def test_the_part_is_registered() -> None:
    assert isinstance(SPECULATIONS.find("ngram").build(SpeculationContext()), NgramSpeculation)
