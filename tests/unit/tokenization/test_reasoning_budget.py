"""The budget of an output's reasoning, token by token."""

from __future__ import annotations

import random

import pytest

from core.errors import InvalidValueError
from core.request import ReasoningBudget
from tokenization.grammars.reasoning import AnyText, BudgetMatcher

VOCAB = 40
END = (3, 4, 3, 5)


def allowed_ids(mask: bytes) -> list[int]:
    return [token for token in range(VOCAB) if mask[token // 8] >> token % 8 & 1]


def follow(budget: ReasoningBudget, seed: int) -> tuple[list[int], int]:
    """An output of random tokens, of those that are allowed, and in how many steps only one was."""
    rng, matcher = random.Random(seed), BudgetMatcher(AnyText(VOCAB), budget)
    output: list[int] = []
    num_forced = 0
    for _ in range(30):
        options = allowed_ids(matcher.allowed())
        num_forced += len(options) == 1
        guess = [rng.choice([3, 4, 5, 9]) for _ in range(4)]
        masks = matcher.allowed_after(guess)
        kept = matcher.num_allowed(guess)
        assert len(masks) == kept + 1, "a mask for each token that may come, and for what follows it"
        assert [allowed_ids(mask).count(token) for mask, token in zip(masks, guess, strict=False)][:kept] == [1] * kept
        token = rng.choice(options) if rng.random() < 0.5 or not kept else guess[0]
        matcher.advance([token])
        output.append(token)
        again = BudgetMatcher(AnyText(VOCAB), budget)
        again.advance(output)
        assert again.allowed() == matcher.allowed(), "it depends on the output alone"
    assert matcher.num_tokens == len(output)
    return output, num_forced


def ends_at(output: list[int], first: int) -> int:
    """Where ``END`` begins for the first time, from a place on."""
    return next(i for i in range(first, len(output)) if tuple(output[i : i + len(END)]) == END)


@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_reasoning_has_at_most_so_many_tokens(num_tokens: int) -> None:
    lengths = set()
    for seed in range(200):
        output, num_forced = follow(ReasoningBudget(num_tokens, (), END), seed)
        length = ends_at(output, 0)
        assert length <= num_tokens
        # What was said of the end already is not said twice.
        assert num_forced <= len(END)
        lengths.add(length)
    assert num_tokens in lengths or num_tokens == 7


def test_an_output_that_begins_otherwise_has_no_reasoning() -> None:
    matcher = BudgetMatcher(AnyText(VOCAB), ReasoningBudget(0, (7, 8), END))
    matcher.advance([7, 9])
    assert len(allowed_ids(matcher.allowed())) == VOCAB
    matcher = BudgetMatcher(AnyText(VOCAB), ReasoningBudget(0, (7, 8), END))
    matcher.advance([7])
    assert len(allowed_ids(matcher.allowed())) == VOCAB
    matcher.advance([8])
    assert allowed_ids(matcher.allowed()) == [END[0]]


def test_what_no_budget_is() -> None:
    for num_tokens, end in ((-1, END), (3, ())):
        with pytest.raises(InvalidValueError, match="thinking_token_budget"):
            ReasoningBudget(num_tokens, (), end)
