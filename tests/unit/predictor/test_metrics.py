"""Scores of forecasts, by hand."""

from __future__ import annotations

import pytest

from core.forecast import QUANTILES, Forecast
from predictor.metrics import score


def flat(length: float, rank: float | None = None) -> Forecast:
    return Forecast(length, (length,) * len(QUANTILES), 1, "test", 1, rank)


def test_two_requests_by_hand() -> None:
    found = score([flat(10), flat(30)], [14, 27])
    assert found.n == 2
    assert found.rmse == pytest.approx(((16 + 9) / 2) ** 0.5)
    assert found.mae == pytest.approx(3.5)
    assert found.tau == 1
    levels = sum(QUANTILES)
    assert found.pinball == pytest.approx((levels * 4 + (len(QUANTILES) - levels) * 3) / 2 / len(QUANTILES))
    assert found.coverage == {"0.1": 0.5, "0.5": 0.5, "0.9": 0.5}


def test_what_equals_the_quantile_is_half_covered() -> None:
    assert score([flat(10)], [10]).coverage["0.9"] == 0.5


def test_the_order_is_that_of_ranks_where_there_are_some() -> None:
    assert score([flat(10, 2.0), flat(30, 1.0)], [14, 27]).tau == -1


def test_nothing_to_order() -> None:
    assert score([flat(10), flat(10)], [1, 2]).tau == 0
    assert score([flat(1), flat(2)], [5, 5]).tau == 0
    assert score([], []).n == 0
