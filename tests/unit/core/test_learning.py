"""When to learn, and from what."""

from __future__ import annotations

import math

import pytest

from core.errors import InvalidValueError
from core.learning import ErrorRule, Schedule


def test_an_error_must_exceed_both_limits() -> None:
    rule = ErrorRule(min_error=10, min_share=0.1)
    assert rule.is_wrong(predicted=100, actual=112)
    assert rule.is_wrong(predicted=112, actual=100)
    assert not rule.is_wrong(predicted=50, actual=60), "10 does not exceed 10"
    assert not rule.is_wrong(predicted=180, actual=200), "20 does not exceed a tenth of 200"
    assert rule.is_wrong(predicted=179, actual=200)


@pytest.mark.parametrize("field", ["min_error", "min_share"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_limits_that_mean_nothing_are_refused(field: str, value: float) -> None:
    with pytest.raises(InvalidValueError, match=field):
        ErrorRule(**{"min_error": 1.0, "min_share": 0.1, field: value})


def test_a_period_begins_with_the_first_question_and_again_whenever_one_is_over() -> None:
    schedule = Schedule(120)
    claimed = [now for now in (1000, 1119, 1120, 1121, 1239, 1250, 1369, 1370, 2000, 2000) if schedule.claim(now)]
    assert claimed == [1120, 1250, 1370, 2000]


@pytest.mark.parametrize("period_s", [0, -1, math.nan, math.inf])
def test_a_period_that_is_none_is_refused(period_s: float) -> None:
    with pytest.raises(InvalidValueError, match="period_s"):
        Schedule(period_s)
