"""The law of output lengths: its history with cuts and conditional draws, and forecasts as far as they are trusted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farsight.core.forecast import Forecast
from farsight.policies.lengths.history import IntArray, LengthHistory
from farsight.policies.lengths.law import (
    LEVELS,
    NUM_POINTS,
    UNKNOWN,
    PredictorGate,
    crps,
    forecast_points,
    merged,
    remaining,
)

EXAMPLE = (2, 3, 3, 5, 8)


def ints(*values: int) -> IntArray:
    return np.array(values, dtype=np.int64)


def test_outputs_that_go_on_count_as_cut_ones_and_are_not_kept() -> None:
    levels = np.linspace(0.05, 0.95, 19)
    history, cut = LengthHistory(), LengthHistory()
    for length in (5, 8, 8, 13):
        history.add(length)
        cut.add(length)
    before = history.quantiles(levels)
    for length in (8, 40, 2):
        cut.add(length, censored=True)
    np.testing.assert_array_equal(history.quantiles(levels, [8, 40, 2]), cut.quantiles(levels))
    assert history.quantiles(levels, [8, 40, 2])[-1] == 40
    np.testing.assert_array_equal(history.quantiles(levels), before)


def test_mass_above_everything_seen_is_the_limit_of_the_job() -> None:
    """An end at 2, a cut at 5: half of the mass lies beyond 5, it is not known where."""
    history = LengthHistory(initial=[2])
    history.add(5, censored=True)
    assert history.quantiles(np.array([0.5, 0.51])).tolist() == [2, 5]
    drawn = history.sample_above(np.random.default_rng(0), ints(0, 2, 5), ints(30, 30, 30), 20_000)
    assert (drawn[:, 0] == 30).mean() == pytest.approx(0.5, abs=0.02)
    assert (history.sample(np.random.default_rng(0), 20_000) == 2).mean() == pytest.approx(0.5, abs=0.02)
    assert (drawn[:, 1:] == 30).all()


def test_only_cuts_say_nothing_of_ends() -> None:
    history = LengthHistory()
    history.add(4, censored=True)
    history.add(0, censored=True)
    assert (history.sample_above(np.random.default_rng(0), ints(0, 9), ints(12, 10), 5) == [12, 10]).all()
    assert history.quantiles(np.array([0.1, 0.9])).tolist() == [4, 4]


def test_without_a_longer_entry_the_limit_is_assumed_and_never_exceeded() -> None:
    history = LengthHistory(initial=EXAMPLE)
    drawn = history.sample_above(np.random.default_rng(0), ints(8, 3, 0, 6), ints(9, 4, 1, 6), 200)
    assert (drawn == [9, 4, 1, 6]).all()
    empty = LengthHistory()
    assert (empty.sample_above(np.random.default_rng(0), ints(0), ints(7), 3) == 7).all()


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    generated=st.lists(st.integers(0, 70), min_size=1, max_size=8),
)
def test_draws_are_entries_that_are_longer_than_what_is_generated(lengths: list[int], generated: list[int]) -> None:
    history = LengthHistory(initial=lengths)
    limit = np.full(len(generated), 80)
    drawn = history.sample_above(np.random.default_rng(3), ints(*generated), limit, 20)
    assert drawn.shape == (20, len(generated))
    assert (drawn > generated).all() and (drawn <= 80).all()
    assert set(drawn.ravel().tolist()) <= {*lengths, 80}
    for column, so_far in zip(drawn.T, generated, strict=True):
        assert (column == 80).all() == (not any(length > so_far for length in lengths))


@settings(max_examples=100, deadline=None)
@given(entries=st.lists(st.tuples(st.integers(0, 20), st.booleans()), min_size=1, max_size=30))
def test_quantiles_match_the_product_limit_formula(entries: list[tuple[int, bool]]) -> None:
    history = LengthHistory()
    for length, censored in entries:
        history.add(length, censored=censored)
    level = 0.37
    survival = 1.0
    for value in sorted({length for length, censored in entries if not censored}):
        survival *= 1 - entries.count((value, False)) / sum(length >= value for length, _ in entries)
        if 1 - survival >= level - 1e-9:
            expected = value
            break
    else:
        expected = max(length for length, _ in entries)
    assert history.quantiles(np.array([level])) == expected


def test_the_window_forgets_and_the_version_rises() -> None:
    history = LengthHistory(3, initial=[1, 2, 3])
    version = history.version
    for new in range(4, 9):
        history.add(new)
        assert history.quantiles(np.array([0.3, 0.6, 0.9])).tolist() == [new - 2, new - 1, new]
        assert len(history) == 3
        assert history.version == version + new - 3


def law_of(*quantiles: float) -> Forecast:
    return Forecast(mean=float(np.mean(quantiles)), quantiles=quantiles, num_samples=1, source="test", version=0)


def both(law_of: np.ndarray | None, history: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    points, source = merged((UNKNOWN if law_of is None else law_of)[None], history)
    assert (np.sort(points[0]) == points[0]).all()
    return points[0], source[0]


def law(
    points: np.ndarray, source: np.ndarray, omega: float, generated: int, limit: int = 10_000
) -> tuple[np.ndarray, np.ndarray]:
    tokens, weights = remaining(
        points[None], source[None], omega, np.array([float(generated)]), np.array([limit * 1.0])
    )
    return tokens[0], weights[0]


def test_points_interpolate_between_the_levels() -> None:
    assert (forecast_points(law_of(*[40.0] * 6)) == 40).all()
    points = forecast_points(law_of(100.0, 250.0, 500.0, 750.0, 900.0, 990.0))
    assert points.tolist() == np.ceil(np.clip(LEVELS, 0.1, 0.99) * 1000).tolist()


@pytest.mark.parametrize(
    ("forecast", "history", "generated", "expected"),
    [(10, 30, 0, {10: 0.8, 30: 0.2}), (10, 30, 10, {20: 1.0}), (7, None, 0, {7: 1.0}), (None, 9, 0, {9: 1.0})],
    ids=["omega and the rest", "conditioned by what there is", "a forecast alone", "a history alone"],
)
def test_halves_weigh_omega_and_the_rest(
    forecast: float | None, history: float | None, generated: int, expected: dict[int, float]
) -> None:
    halves = [None if each is None else np.full(NUM_POINTS, float(each)) for each in (forecast, history)]
    tokens, weights = law(*both(*halves), 0.8, generated)
    for length, weight in expected.items():
        assert np.isclose(weights[tokens == length].sum(), weight)


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


def test_crps_equals_its_definition() -> None:
    rng = np.random.default_rng(2)
    for _ in range(50):
        points, value = np.sort(rng.integers(0, 100, NUM_POINTS).astype(float)), float(rng.integers(0, 120))
        pairs = np.abs(points[:, None] - points[None]).mean()
        assert np.isclose(crps(points, value), np.abs(points - value).mean() - pairs / 2)


def gate_after(*, shuffled: bool, num: int = 200) -> PredictorGate:
    rng = np.random.default_rng(3)
    lengths = rng.integers(10, 1000, 1000).astype(float)
    history, gate = np.quantile(lengths, LEVELS), PredictorGate()
    told = rng.permutation(lengths) if shuffled else lengths
    for length, guess in zip(lengths[:num], told, strict=False):
        gate.observe(guess * np.linspace(0.8, 1.2, NUM_POINTS), history, int(length))
    return gate


def test_a_good_predictor_is_believed_and_a_shuffled_one_is_not() -> None:
    assert gate_after(shuffled=False, num=19).omega == 0.5, "half, until there are enough"
    assert gate_after(shuffled=False, num=20).omega > 0.9
    assert gate_after(shuffled=False).omega > 0.9
    assert gate_after(shuffled=True).omega < 0.05


def test_equal_laws_get_half_of_the_largest_weight() -> None:
    gate = PredictorGate(min_completions=1)
    gate.observe(np.full(NUM_POINTS, 5.0), np.full(NUM_POINTS, 5.0), 9)
    assert np.isclose(gate.omega, 0.485)
    exact = PredictorGate(min_completions=1)
    exact.observe(np.full(NUM_POINTS, 6.0), np.full(NUM_POINTS, 5.0), 5)
    assert exact.omega < 0.01, "a history that is exact is not beaten"


def test_old_completions_are_forgotten() -> None:
    gate, good, bad = PredictorGate(window=20), np.full(NUM_POINTS, 5.0), np.full(NUM_POINTS, 50.0)
    for _ in range(20):
        gate.observe(bad, good, 6)
    for _ in range(20):
        gate.observe(good, bad, 6)
    assert gate.omega > 0.9
