"""How far forecasts are trusted."""

from __future__ import annotations

import numpy as np
import pytest

from core.errors import InvalidValueError
from policies.lengths.law import LEVELS, NUM_POINTS
from policies.lengths.trust import PredictorGate, crps


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
    assert gate_after(shuffled=False).omega > 0.9
    assert gate_after(shuffled=True).omega < 0.05


def test_half_until_there_are_enough() -> None:
    assert gate_after(shuffled=False, num=19).omega == 0.5
    assert gate_after(shuffled=False, num=20).omega > 0.9


def test_equal_laws_get_half_of_the_largest_weight() -> None:
    gate = PredictorGate(min_completions=1)
    gate.observe(np.full(NUM_POINTS, 5.0), np.full(NUM_POINTS, 5.0), 9)
    assert np.isclose(gate.omega, 0.485)


def test_an_exact_history_is_not_beaten() -> None:
    gate = PredictorGate(min_completions=1)
    gate.observe(np.full(NUM_POINTS, 6.0), np.full(NUM_POINTS, 5.0), 5)
    assert gate.omega < 0.01


def test_old_completions_are_forgotten() -> None:
    gate, good, bad = PredictorGate(window=20), np.full(NUM_POINTS, 5.0), np.full(NUM_POINTS, 50.0)
    for _ in range(20):
        gate.observe(bad, good, 6)
    for _ in range(20):
        gate.observe(good, bad, 6)
    assert gate.omega > 0.9


@pytest.mark.parametrize("bounds", [{"min_completions": 0}, {"window": 10}])
def test_bad_bounds(bounds: dict[str, int]) -> None:
    with pytest.raises(InvalidValueError):
        PredictorGate(**bounds)
