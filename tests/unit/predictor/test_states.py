"""Forecasts from hidden states: what a regression learns from, whether it serves, and how it outlives its process."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from farsight.core.errors import InvalidValueError
from farsight.core.forecast import QUANTILES, Forecast, StateQuestion
from farsight.predictor.artefact import from_bytes
from farsight.predictor.metrics import coverage_of, kendall_tau
from farsight.predictor.states import MAX_DIM, MIN_EXAMPLES, StateRegression

LIMIT = 256


def ended(num: int, dim: int, signal: float, seed: int = 0) -> list[tuple[StateQuestion, int]]:
    """Lengths that a direction of the state tells, beside noise; without a signal the state tells nothing."""
    rng = np.random.default_rng(seed)
    direction = np.random.default_rng(99).standard_normal(dim) / np.sqrt(dim)
    before = Forecast(80.0, tuple(np.quantile([20, 50, 90, 150, 256], QUANTILES)), 100, "history", 1)
    found = []
    for number in range(num):
        state = rng.standard_normal(dim)
        log_len = 4.0 + signal * float(state @ direction) + 0.4 * rng.standard_normal()
        length = int(np.clip(np.exp(log_len), 1, LIMIT))
        found.append((StateQuestion(f"r{number}", 50, LIMIT, before, state.astype(np.float16).tobytes()), length))
    return found


def learned(examples: list[tuple[StateQuestion, int]], dim: int) -> StateRegression:
    regression = StateRegression(dim)
    for begin in range(0, len(examples), 20 if dim < MAX_DIM else 80):  # each solves, which takes the wide one 30 ms
        regression.learn(examples[begin : begin + 20 if dim < MAX_DIM else begin + 80])
    return regression


@pytest.mark.parametrize("dim", [24, MAX_DIM + 64])
def test_a_direction_of_the_state_orders_requests_and_its_law_covers_them(dim: int) -> None:
    examples = ended(900, dim, 0.8)
    regression = learned(examples[:700], dim)
    assert regression.serves and regression.num_examples == 700
    lens = np.array([length for _, length in examples[700:]])
    made = regression.forecast([question for question, _ in examples[700:]])
    least = 0.6 if dim < MAX_DIM else 0.3  # 700 examples do not fill so many dimensions
    assert kendall_tau([each.mean for each in made], lens) > least
    for level in (0.5, 0.9):
        covered = coverage_of(np.array([each.quantiles[QUANTILES.index(level)] for each in made]), lens)
        assert covered == pytest.approx(level, abs=0.1)
    assert all(each.source == "states" and each.quantiles[-1] <= LIMIT for each in made)


def test_states_that_tell_nothing_do_not_serve() -> None:
    examples = ended(600, 24, 0.0)
    lens = [length for _, length in examples]
    exact = Forecast(float(np.mean(lens)), tuple(np.quantile(lens, QUANTILES)), 600, "history", 1)
    assert not learned([(replace(question, before=exact), length) for question, length in examples], 24).serves


def test_the_first_requests_get_the_forecast_that_was_made_before() -> None:
    examples = ended(2 * MIN_EXAMPLES, 24, 0.8)
    assert not learned(examples[:-1], 24).serves, "with too few forecasts of its own nothing can be told"
    regression = learned(examples[: MIN_EXAMPLES - 1], 24)
    assert regression.forecast([examples[0][0]]) == [examples[0][0].before]
    assert regression.forecast([]) == []


def test_what_was_learned_goes_on_in_another_process_with_the_same_weights_only() -> None:
    examples = ended(400, 24, 0.8)
    first = learned(examples[:300], 24)
    artefact = from_bytes(first.to_artefact("w").to_bytes())
    again = StateRegression.of_artefact(artefact, "w")
    assert again is not None and StateRegression.of_artefact(artefact, "other") is None
    asked = [question for question, _ in examples[300:]]
    assert again.forecast(asked) == first.forecast(asked) and again.serves
    for each in (first, again):
        each.learn(examples[300:])
    pairs = zip(again.forecast(asked), first.forecast(asked), strict=True)
    assert all(each.mean == pytest.approx(other.mean, rel=0.5) for each, other in pairs), "of fewer states, not of none"
    damaged = replace(artefact, arrays={**artefact.arrays, "products": np.zeros((2, 2))})
    with pytest.raises(ValueError, match="fit together"):
        StateRegression.of_artefact(damaged, "w")


def test_a_state_of_another_width_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="48 bytes"):
        StateRegression(24).learn(ended(1, 23, 0.0))
    with pytest.raises(InvalidValueError, match="dim"):
        StateRegression(0)
