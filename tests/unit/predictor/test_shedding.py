"""Forecasts take no more than their share of a processor."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import InvalidValueError
from predictor.shedding import Effort, EffortBudget


def test_from_full_to_length_to_history_and_back() -> None:
    budget = EffortBudget(share=0.1, burst_s=0.1, full_s=0.02, length_s=0.001)
    assert budget.choose(0.0) is Effort.FULL
    budget.spend(Effort.FULL, 0.09)
    assert budget.cost_s(Effort.FULL) == pytest.approx(0.027)
    assert budget.choose(0.0) is Effort.LENGTH  # 10 ms are left
    budget.spend(Effort.LENGTH, 0.0099)
    assert budget.choose(0.0) is Effort.HISTORY  # 0.1 ms are left
    assert budget.choose(0.02) is Effort.LENGTH  # 2 ms more
    assert budget.choose(0.3) is Effort.FULL  # 30 ms


def test_many_together_cost_more_than_one() -> None:
    budget = EffortBudget(share=0.1, burst_s=0.4, full_s=0.02, length_s=0.001)
    assert budget.choose(0.0, 20) is Effort.FULL
    budget.spend(Effort.FULL, 0.3, 20)
    assert budget.cost_s(Effort.FULL) == pytest.approx(0.02 + 0.1 * (0.015 - 0.02))
    assert budget.choose(0.0, 20) is Effort.LENGTH
    assert budget.choose(0.0, 5) is Effort.FULL


def test_what_can_never_be_saved_up_still_gets_its_turn() -> None:
    budget = EffortBudget(share=0.1, burst_s=0.1, full_s=5.0)
    assert budget.choose(0.0) is Effort.FULL
    budget.spend(Effort.FULL, 5.0)
    assert budget.choose(10.0) is Effort.HISTORY  # a debt of 4.9 s, 1 s of it worked off
    assert budget.choose(60.0) is Effort.FULL


def test_a_clock_that_stands_or_goes_back_saves_nothing() -> None:
    budget = EffortBudget(share=1.0, burst_s=0.1)
    budget.choose(5.0)
    budget.spend(Effort.FULL, 0.1)
    assert budget.choose(5.0) is Effort.HISTORY
    assert budget.choose(4.0) is Effort.HISTORY


def test_idle_hours_save_up_no_more_than_a_burst() -> None:
    budget = EffortBudget(share=0.5, burst_s=0.1, full_s=0.02)
    budget.choose(0.0)
    assert budget.choose(10_000.0) is Effort.FULL
    budget.spend(Effort.FULL, 0.1)
    assert budget.choose(10_000.0) is Effort.HISTORY


def test_history_is_free() -> None:
    budget = EffortBudget(share=0.1)
    budget.spend(Effort.HISTORY, 100.0)
    budget.spend(Effort.FULL, 100.0, 0)
    assert budget.cost_s(Effort.HISTORY) == 0
    assert budget.choose(0.0) is Effort.FULL


@settings(max_examples=50)
@given(st.floats(0.05, 0.9), st.floats(0.001, 0.1), st.lists(st.floats(0, 0.05), min_size=50, max_size=200))
def test_never_more_than_its_share(share: float, full_s: float, gaps: list[float]) -> None:
    budget = EffortBudget(share, burst_s=0.5, full_s=full_s)
    costs = {Effort.FULL: full_s, Effort.LENGTH: 0.0005, Effort.HISTORY: 0.0}
    now = spent = 0.0
    for gap in gaps:
        now += gap
        effort = budget.choose(now)
        spent += costs[effort]
        budget.spend(effort, costs[effort])
    assert spent <= 0.5 + share * now + full_s


@pytest.mark.parametrize("field", ["share", "burst_s", "full_s", "length_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_bad_parameters(field: str, value: float) -> None:
    with pytest.raises(InvalidValueError, match=field):
        EffortBudget(**{"share": 0.5, field: value})
