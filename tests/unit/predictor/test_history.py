"""The forecast is the distribution of the last output lengths."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farsight.core.codec import decode, encode
from farsight.core.errors import InvalidValueError
from farsight.core.forecast import QUANTILES, Forecast, ForecastQuestion
from farsight.predictor.history import PRIOR_MEAN, HistoryPredictor
from farsight.predictor.metrics import score
from farsight.predictor.shedding import Effort, EffortBudget

LENGTHS = st.lists(st.integers(0, 100_000), min_size=1, max_size=50)


def test_whatever_is_asked_the_answer_is_the_prior_and_then_what_was_learned() -> None:
    predictor = HistoryPredictor()
    history = HistoryPredictor()
    prior = history.current()
    assert (prior.mean, prior.num_samples, prior.source, prior.version) == (PRIOR_MEAN, 0, "history", 0)
    assert list(prior.quantiles) == sorted(prior.quantiles) and prior.quantiles[0] > 0
    questions = [ForecastQuestion(str(n), "sum up", "x" * n, n, n + 2, 100) for n in range(3)]
    assert (predictor.forecast(questions), predictor.forecast([])) == ([prior] * 3, [])
    history.learn([])
    assert history.current() == prior
    history.learn(range(101))
    found = history.current()
    assert found.quantiles == pytest.approx([100 * level for level in QUANTILES])
    assert (found.mean, found.num_samples, found.version) == (50, 101, 1)


def test_only_the_last_of_the_window_count() -> None:
    for window in (0, -1):
        with pytest.raises(InvalidValueError, match="window"):
            HistoryPredictor(window)
    predictor = HistoryPredictor(window=3)
    predictor.learn([1000, 1000])
    predictor.learn([1, 2, 3])
    assert predictor.current() == Forecast(2.0, predictor.current().quantiles, 3, "history", 2)
    predictor.learn([4])
    assert predictor.current().mean == 3
    assert predictor.current().version == 3


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


def flat(length: float, rank: float | None = None) -> Forecast:
    return Forecast(length, (length,) * len(QUANTILES), 1, "test", 1, rank)


def test_scores_of_forecasts_by_hand() -> None:
    found = score([flat(10), flat(30)], [14, 27])
    assert found.n == 2
    assert found.rmse == pytest.approx(((16 + 9) / 2) ** 0.5)
    assert found.mae == pytest.approx(3.5)
    assert found.tau == 1
    levels = sum(QUANTILES)
    assert found.pinball == pytest.approx((levels * 4 + (len(QUANTILES) - levels) * 3) / 2 / len(QUANTILES))
    assert found.coverage == {"0.1": 0.5, "0.5": 0.5, "0.9": 0.5}
    assert score([flat(10)], [10]).coverage["0.9"] == 0.5, "what equals the quantile is half covered"
    assert score([flat(10, 2.0), flat(30, 1.0)], [14, 27]).tau == -1, "the order is that of ranks"
    assert score([flat(10), flat(10)], [1, 2]).tau == score([flat(1), flat(2)], [5, 5]).tau == 0
    assert score([], []).n == 0


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
    assert budget.choose(10_000.0) is Effort.FULL
    budget.spend(Effort.HISTORY, 100.0)
    budget.spend(Effort.FULL, 100.0, 0)
    assert (budget.cost_s(Effort.HISTORY), budget.choose(10_000.0)) == (0, Effort.FULL), "history is free, and none"
    budget.spend(Effort.FULL, 0.1)
    assert budget.choose(10_000.0) is Effort.HISTORY, "idle hours save up no more than a burst"


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
