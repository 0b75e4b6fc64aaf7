"""Continuous learning: the paper's rule and period, examples held out of the training, and no step back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from farsight.core.errors import IntegrityError
from farsight.core.learning import ErrorRule
from farsight.predictor.learning import (
    HELD_BACK_EVERY,
    MAX_EXAMPLES,
    MAX_HELD_BACK,
    MIN_HELD_BACK,
    PERIOD_S,
    RULE,
    ContinuousLearning,
    PredictionOutcome,
)

Row = tuple[float, float, float]
"""Task, input length, output length."""


def wrong(num: int, first: int = 0) -> list[PredictionOutcome[int]]:
    return [PredictionOutcome(first + i, 1.0, 100.0) for i in range(num)]


def distance(model: float, examples: Sequence[int]) -> float:
    """A model is a number, its error that of the mean of the examples."""
    return abs(model - sum(examples) / len(examples))


def numbers(current: float | None = None, rule: ErrorRule = RULE) -> ContinuousLearning[int, float]:
    learning = ContinuousLearning(distance, current, rule=rule)
    assert learning.begin(0.0) is None
    return learning


def test_one_in_five_is_held_back_and_the_rest_trained_on_if_it_was_wrong() -> None:
    learning = numbers()
    right = [PredictionOutcome(1000 + i, 99.0, 100.0) for i in range(50)]
    unknown = [PredictionOutcome(2000 + i, None, 100.0) for i in range(10)]
    learning.observe([*wrong(MIN_HELD_BACK * HELD_BACK_EVERY), *right, *unknown])
    examples = learning.begin(PERIOD_S)
    assert examples is not None
    assert examples == [i for i in range(100) if (i + 1) % 5] + [2000 + i for i in range(10) if (i + 1) % 5]
    verdict = learning.judge(0.0)
    held_back = [*range(4, 100, 5), *range(1004, 1050, 5), 2004, 2009]
    assert verdict.score == distance(0.0, held_back), "all that was held back, whether it was wrong or not"


def test_which_errors_count_is_told_and_by_default_what_the_paper_says() -> None:
    """ex2: (predicted, actual) tokens; predictions that are off by 6 count where 5 do, and not where 10 do."""
    cases = {(100, 112): True, (50, 58): False, (200, 215): False, (100, 111): False, (100, 130): True}
    assert {case: RULE.is_wrong(*case) for case in cases} == cases
    usual, keen = numbers(), numbers(rule=ErrorRule(5.0, 0.1))
    for learning in (usual, keen):
        learning.observe([PredictionOutcome(i, 26.0, 20.0) for i in range(100)])
    assert (usual.num_examples, keen.num_examples) == (0, 80)


def test_what_was_cut_off_is_never_a_target() -> None:
    learning = numbers()
    learning.observe([PredictionOutcome(i, 1.0, 100.0, censored=True) for i in range(1000)])
    assert learning.begin(PERIOD_S) is None and learning.num_examples == 0
    learning.observe(
        [each for i, o in enumerate(wrong(100)) for each in (o, PredictionOutcome(-i, 1.0, 9.0, censored=True))]
    )
    examples = learning.begin(2 * PERIOD_S)
    assert examples is not None and min(examples) >= 0 and len(examples) == 80


def test_a_fit_begins_every_three_minutes_if_there_is_something_new() -> None:
    learning = numbers()
    learning.observe(wrong(200))
    assert learning.begin(179.9) is None
    assert learning.begin(180.0) is not None
    learning.judge(100.0)
    assert learning.begin(360.0) is None, "nothing new"
    learning.observe(wrong(10))
    assert learning.begin(400.0) is None, "the period that began at 360 is not over"
    assert learning.begin(540.0) is not None
    learning.observe(wrong(10))
    assert learning.begin(720.0) is None, "the fit before has not ended"
    learning.judge(100.0)
    assert learning.begin(900.0) is not None
    few = numbers()
    few.observe(wrong(MIN_HELD_BACK * HELD_BACK_EVERY - 1))
    assert few.begin(PERIOD_S) is None, "too few to judge it by"
    few.observe(wrong(1))
    assert few.begin(2 * PERIOD_S) is not None
    bounded = ContinuousLearning(distance, 0.0, range(MAX_EXAMPLES + 10))
    assert bounded.num_examples == MAX_EXAMPLES
    bounded.begin(0.0)
    bounded.observe(wrong(100, first=10**6))
    examples = bounded.begin(PERIOD_S)
    assert examples is not None and examples[0] == 90 and examples[-1] == 10**6 + 98


def test_a_version_replaces_one_that_is_no_better_on_what_came_last() -> None:
    """Held back are 4, 9 ... 99: a mean of 51.5."""
    learning = numbers(current=50.0)
    accepted = []
    for round_, model in enumerate((49.0, 53.0, 51.0, 52.0, math.nan, math.inf, 52.0)):
        learning.observe(wrong(100))
        assert learning.begin((round_ + 1) * PERIOD_S) is not None
        verdict = learning.judge(model)
        learning.check_integrity()
        accepted.append(verdict.accepted)
    assert accepted == [False, True, True, True, False, False, True]
    assert learning.current == 52.0 and learning.version == 5
    learning = numbers()  # the first version needs no other to beat
    for period, model in enumerate((math.nan, 1e9)):
        learning.observe(wrong(100))
        learning.begin((period + 1) * PERIOD_S)
        verdict = learning.judge(model)
        assert (verdict.accepted, verdict.current_score, learning.version) == (period == 1, None, period)


def test_both_are_judged_by_the_window_of_the_moment() -> None:
    """What ends during the fit counts, and only the newest do."""
    learning = numbers(current=0.0)
    learning.observe(wrong(100))
    learning.begin(PERIOD_S)
    learning.observe(wrong(MAX_HELD_BACK * HELD_BACK_EVERY, first=10**6))
    verdict = learning.judge(1e6)
    assert verdict.accepted and verdict.current_score == pytest.approx(1e6, rel=0.01)


def test_a_lost_fit_leaves_the_version_and_is_tried_again() -> None:
    learning = numbers(current=50.0)
    learning.observe(wrong(100))
    first = learning.begin(PERIOD_S)
    learning.give_up()
    assert (learning.current, learning.version, learning.is_fitting) == (50.0, 1, False)
    assert learning.begin(1.5 * PERIOD_S) is None, "not at once"
    assert learning.begin(2 * PERIOD_S) == first
    with pytest.raises(ZeroDivisionError):
        learning.give_up()
        learning.learn(3 * PERIOD_S, lambda examples: 1 / 0)
    assert not learning.is_fitting and learning.begin(4 * PERIOD_S) == first
    for end in (lambda: numbers().judge(1.0), lambda: numbers().give_up()):
        with pytest.raises(IntegrityError, match="not begun"):
            end()


def test_any_life_keeps_its_counts() -> None:
    rng = np.random.default_rng(0)
    learning = numbers()
    now, best = 0.0, 0
    for _ in range(2000):
        match int(rng.integers(5)):
            case 0:
                now += float(rng.exponential(100.0))
                learning.begin(now)
            case 1 if learning.is_fitting:
                learning.judge(float(rng.uniform(0, 200)))
            case 2 if learning.is_fitting:
                learning.give_up()
            case _:
                learning.observe(
                    PredictionOutcome(int(rng.integers(200)), 1.0, 100.0, bool(rng.random() < 0.2)) for _ in range(9)
                )
        learning.check_integrity()
        assert learning.version >= best
        best = learning.version
    assert best > 1


# A small forest, and tasks whose mix changes half-way.


def requests(num: int, tasks: Sequence[int], seed: int) -> list[Row]:
    """Each task answers with its own multiple of the input, give or take a tenth."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(num):
        task, length = int(rng.choice(tasks)), float(rng.integers(20, 300))
        rows.append((float(task), length, max(1.0, (0.2, 1.0, 3.0, 0.5)[task] * length * rng.normal(1, 0.1))))
    return rows


def fit(rows: Sequence[Row]) -> Any:
    from sklearn.ensemble import RandomForestRegressor

    data = np.array(rows)
    return RandomForestRegressor(20, max_depth=10, random_state=0, n_jobs=1).fit(data[:, :2], data[:, 2])


def rmse(model: Any, rows: Sequence[Row]) -> float:
    data = np.array(rows)
    return float(np.sqrt(np.mean((model.predict(data[:, :2]) - data[:, 2]) ** 2)))


def outcomes(model: Any, rows: Sequence[Row]) -> list[PredictionOutcome[Row]]:
    predicted = model.predict(np.array(rows)[:, :2]).tolist()
    return [PredictionOutcome(row, guess, row[2]) for row, guess in zip(rows, predicted, strict=True)]


def test_after_the_mix_of_tasks_has_changed_the_error_falls_again() -> None:
    before = requests(400, (0, 1), seed=0)
    first = fit(before)
    learning = ContinuousLearning(rmse, first, before)
    learning.begin(0.0)
    errors = []
    for period in range(1, 9):
        tasks = (0, 1) if period < 4 else (2, 3)
        served = requests(200, tasks, seed=period)
        assert learning.current is not None
        errors.append(rmse(learning.current, served))
        learning.observe(outcomes(learning.current, served))
        learning.learn(period * PERIOD_S, fit)
    settled, changed, relearned, never = max(errors[:3]), errors[3], errors[-1], rmse(first, served)
    assert changed > 5 * settled, "the change hurts"
    assert relearned < 0.2 * changed and never > 5 * relearned, "learning, not the requests, made it good"
    assert learning.version > 1
    serving, version, rng = learning.current, learning.version, np.random.default_rng(0)

    def fit_shuffled(rows: Sequence[Row]) -> Any:
        data = np.array(rows)
        data[:, 2] = rng.permutation(data[:, 2])
        return fit([tuple(row) for row in data.tolist()])

    learning.observe(outcomes(serving, requests(500, (2, 3), seed=9)))
    verdict = learning.learn(9 * PERIOD_S, fit_shuffled)
    assert verdict is not None and not verdict.accepted, "it learned nonsense"
    assert verdict.current_score is not None and verdict.score > 2 * verdict.current_score
    assert learning.current is serving and learning.version == version
