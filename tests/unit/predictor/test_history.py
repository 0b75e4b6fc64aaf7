"""The forecast is the distribution of the last output lengths."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.codec import decode, encode
from core.errors import InvalidValueError
from core.forecast import QUANTILES, Forecast, ForecastQuestion, Predictor
from predictor.history import PRIOR_MEAN, HistoryPredictor

LENGTHS = st.lists(st.integers(0, 100_000), min_size=1, max_size=50)


def test_without_data_there_is_a_prior_that_says_so() -> None:
    predictor = HistoryPredictor()
    forecast = predictor.current()
    assert (forecast.mean, forecast.num_samples, forecast.source, forecast.version) == (PRIOR_MEAN, 0, "history", 0)
    assert list(forecast.quantiles) == sorted(forecast.quantiles)
    assert forecast.quantiles[0] > 0


def test_mean_and_quantiles_of_what_was_learned() -> None:
    predictor = HistoryPredictor()
    predictor.learn(range(101))
    forecast = predictor.current()
    assert forecast.mean == 50
    assert forecast.quantiles == pytest.approx([100 * level for level in QUANTILES])
    assert (forecast.num_samples, forecast.version) == (101, 1)


def test_only_the_last_of_the_window_count() -> None:
    predictor = HistoryPredictor(window=3)
    predictor.learn([1000, 1000])
    predictor.learn([1, 2, 3])
    assert predictor.current() == Forecast(2.0, predictor.current().quantiles, 3, "history", 2)
    predictor.learn([4])
    assert predictor.current().mean == 3
    assert predictor.current().version == 3


def test_nothing_to_learn_is_no_learning() -> None:
    predictor = HistoryPredictor()
    predictor.learn([])
    assert predictor.current() == HistoryPredictor().current()


def test_whatever_is_asked_the_answer_is_the_same() -> None:
    predictor: Predictor = HistoryPredictor()
    questions = [ForecastQuestion(str(n), "sum up", "x" * n, n, n + 2, 100) for n in range(3)]
    assert predictor.forecast(questions) == [HistoryPredictor().current()] * 3
    assert predictor.forecast([]) == []


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_that_holds_nothing_is_refused(window: int) -> None:
    with pytest.raises(InvalidValueError, match="window"):
        HistoryPredictor(window)


@given(st.lists(LENGTHS, max_size=5), st.integers(1, 60))
def test_every_forecast_is_in_order_within_the_window_and_survives_the_wire(
    batches: list[list[int]], window: int
) -> None:
    predictor = HistoryPredictor(window)
    for batch in batches:
        predictor.learn(batch)
    forecast = predictor.current()
    assert decode(encode(forecast), Forecast) == forecast
    assert list(forecast.quantiles) == sorted(forecast.quantiles)
    assert forecast.version == len(batches)
    kept = [each for batch in batches for each in batch][-window:]
    assert forecast.num_samples == len(kept)
    if kept:
        assert min(kept) <= forecast.quantiles[0] <= forecast.quantiles[-1] <= max(kept)
        assert forecast.mean == pytest.approx(sum(kept) / len(kept))
