"""How answers about other presets are judged."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.counterfactuals import Answers


def answers(was_s: list[float], found_s: list[float], truth_s: list[float]) -> Answers:
    same = np.ones(len(was_s))
    return Answers(np.array(was_s), np.array(found_s), np.array(truth_s), same, same, same)


def test_the_error_is_of_the_truth_and_its_median() -> None:
    assert answers([1.0] * 3, [1.0, 2.2, 30.0], [2.0, 2.0, 20.0]).median_error == pytest.approx(0.5)


def test_the_direction_counts_where_the_truth_differs_by_a_tenth() -> None:
    share, count = answers([1.0] * 4, [1.5, 0.5, 0.5, 3.0], [1.2, 1.3, 0.8, 1.05]).right_direction()
    assert share == pytest.approx(2 / 3) and count == 3
    none, count = answers([1.0], [2.0], [1.05]).right_direction()
    assert math.isnan(none) and count == 0
