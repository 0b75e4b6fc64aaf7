"""What each simulated predictor says."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from farsight.core.errors import InvalidValueError
from farsight.core.forecast import QUANTILES, Forecast
from farsight.simulator.predictors import Noisy, Shuffled, history, none, oracle
from farsight.simulator.traffic.workload import SimRequest


def _arrivals(num: int = 50, output_len: int | None = None, cap: int = 10_000) -> list[SimRequest]:
    return [SimRequest(f"r{i}", float(i), 8, output_len or i + 1, cap) for i in range(num)]


def _forecasts(arrivals: list[SimRequest]) -> list[Forecast]:
    assert all(a.forecast is not None for a in arrivals)
    return [a.forecast for a in arrivals if a.forecast is not None]


def test_the_oracle_is_certain_of_the_truth() -> None:
    for arrival, forecast in zip(_arrivals(), _forecasts(oracle(_arrivals())), strict=True):
        assert forecast.mean == arrival.output_len
        assert forecast.quantiles == (arrival.output_len,) * len(QUANTILES)
        assert forecast.num_samples > 0
    assert history(oracle(_arrivals())) == _arrivals(), "it takes forecasts away"
    assert [f.mean for f in _forecasts(Noisy(0.0)(_arrivals()))] == [a.output_len for a in _arrivals()]


def test_none_knows_nothing_but_the_limit() -> None:
    forecast = _forecasts(none(_arrivals(1, cap=100)))[0]
    assert forecast.num_samples == 0
    assert forecast.quantiles == (10, 25, 50, 75, 90, 99)
    assert forecast.mean == 50.5


def test_noisy_quantiles_hold_as_often_as_they_say() -> None:
    forecasts = _forecasts(Noisy(0.5, seed=3)(_arrivals(8000, output_len=500)))
    for place, level in enumerate(QUANTILES):
        covered = np.mean([f.quantiles[place] >= 500 for f in forecasts])
        assert covered == pytest.approx(level, abs=0.015)


def test_noise_has_the_asked_sigma_and_keeps_the_limits() -> None:
    medians = [f.quantiles[2] for f in _forecasts(Noisy(0.3, seed=1)(_arrivals(8000, output_len=500)))]
    assert np.std(np.log(medians)) == pytest.approx(0.3, rel=0.03)
    capped = _forecasts(Noisy(2.0)(_arrivals(500, output_len=50, cap=60)))
    assert all(1 <= q <= 60 for f in capped for q in (*f.quantiles, f.mean))
    assert all(list(f.quantiles) == sorted(f.quantiles) for f in capped)
    for sigma in (-0.1, float("nan"), float("inf")):
        with pytest.raises(InvalidValueError, match="sigma"):
            Noisy(sigma)


def test_shuffled_gives_every_forecast_to_some_request() -> None:
    shuffled = Shuffled(oracle, seed=1)(_arrivals())
    means = [f.mean for f in _forecasts(shuffled)]
    assert Counter(means) == Counter(a.output_len for a in _arrivals())
    assert sum(m == a.output_len for m, a in zip(means, shuffled, strict=True)) < 10
    assert [a.request_id for a in shuffled] == [a.request_id for a in _arrivals()]


@pytest.mark.parametrize("build", [Noisy, lambda s, seed: Shuffled(Noisy(s), seed)])
def test_seeds_decide(build: type[Noisy]) -> None:
    arrivals = _arrivals()
    assert build(0.5, 1)(arrivals) == build(0.5, 1)(arrivals)
    assert build(0.5, 1)(arrivals) != build(0.5, 2)(arrivals)
