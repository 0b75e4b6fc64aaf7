"""The law of a job's output length."""

from __future__ import annotations

import numpy as np

from core.forecast import Forecast
from policies.lengths.law import LEVELS, NUM_POINTS, UNKNOWN, forecast_points, merged, remaining


def forecast(*quantiles: float) -> Forecast:
    return Forecast(mean=float(np.mean(quantiles)), quantiles=quantiles, num_samples=1, source="test", version=0)


def both(forecast: np.ndarray | None, history: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    points, source = merged((UNKNOWN if forecast is None else forecast)[None], history)
    assert (np.sort(points[0]) == points[0]).all()
    return points[0], source[0]


def law(
    points: np.ndarray, source: np.ndarray, omega: float, generated: int, limit: int = 10_000
) -> tuple[np.ndarray, np.ndarray]:
    tokens, weights = remaining(
        points[None], source[None], omega, np.array([float(generated)]), np.array([limit * 1.0])
    )
    return tokens[0], weights[0]


def test_equal_quantiles_are_a_deterministic_law() -> None:
    assert (forecast_points(forecast(*[40.0] * 6)) == 40).all()


def test_points_interpolate_between_the_levels() -> None:
    points = forecast_points(forecast(100.0, 250.0, 500.0, 750.0, 900.0, 990.0))
    assert points.tolist() == np.ceil(np.clip(LEVELS, 0.1, 0.99) * 1000).tolist()


def test_halves_weigh_omega_and_the_rest() -> None:
    points, source = both(np.full(NUM_POINTS, 10.0), np.full(NUM_POINTS, 30.0))
    tokens, weights = law(points, source, 0.8, 0)
    assert np.isclose(weights[tokens == 10].sum(), 0.8)
    assert np.isclose(weights[tokens == 30].sum(), 0.2)


def test_what_has_been_generated_conditions_the_law() -> None:
    points, source = both(np.full(NUM_POINTS, 10.0), np.full(NUM_POINTS, 30.0))
    tokens, weights = law(points, source, 0.8, 10)
    assert np.isclose(weights[tokens == 20].sum(), 1.0)


def test_a_single_half_counts_in_full() -> None:
    for omega in (0.0, 0.5):
        tokens, weights = law(*both(np.full(NUM_POINTS, 7.0), None), omega, 0)
        assert np.isclose(weights[tokens == 7].sum(), 1.0)
        tokens, weights = law(*both(None, np.full(NUM_POINTS, 9.0)), omega, 0)
        assert np.isclose(weights[tokens == 9].sum(), 1.0)


def test_an_outlived_law_expects_a_quarter_more_but_sixteen_at_least_and_never_passes_the_limit() -> None:
    points, source = both(np.full(NUM_POINTS, 10.0), None)
    for generated, limit, expected in ((20, 1000, 16), (400, 1000, 100), (400, 430, 30), (430, 430, 1)):
        tokens, weights = law(points, source, 0.5, generated, limit)
        assert np.isclose((tokens * weights).sum(), expected)


def test_weights_sum_to_one_and_tokens_rise_where_they_count() -> None:
    rng = np.random.default_rng(1)
    for _ in range(100):
        points, source = both(*np.sort(rng.integers(1, 300, (2, NUM_POINTS)).astype(float)))
        tokens, weights = law(points, source, rng.random(), int(rng.integers(0, 350)), 400)
        assert np.isclose(weights.sum(), 1.0)
        assert (np.diff(tokens[weights > 0]) >= 0).all()
        assert (tokens >= 1).all()
