"""Admission by each job's own law under a risk of eviction: scenarios below 30 jobs, mean and spread above."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import IntegrityError, InvalidValueError
from policies.admission.forecast import LARGE_BATCH, NUM_INTERVALS, NUM_SCENARIOS, ForecastAdmission, MemorySpread
from policies.admission.past_future import future_memory
from policies.interfaces import Job
from policies.lengths.history import FloatArray

LAWS: dict[str, list[float]] = {"A": [2, 6], "B": [3]}


def job(name: str, prompt: int, generated: int = 0, limit: int = 10_000) -> Job:
    return Job(name, 0.0, prompt, limit, output_len=generated)


def admission(laws: dict[str, list[float]], risk: float = 0.05, seed: int = 0) -> ForecastAdmission:
    return ForecastAdmission(
        lambda each: np.array(laws[each.request_id]), np.random.default_rng(seed), eviction_risk=risk
    )


@pytest.mark.parametrize(
    ("risk", "capacity", "admitted"), [(0.1, 15, True), (0.1, 14, False), (0.5, 13, True), (0.5, 12, False)]
)
def test_example_two_jobs(risk: float, capacity: int, admitted: bool) -> None:
    """A b=5 with 2 or 6 to go, B (4, 3): M* is 13 or 15, evenly; the 90% quantile is 15."""
    by_forecast = admission(LAWS, risk)
    by_forecast.begin([job("A", 5)], capacity)
    assert by_forecast.admits(job("B", 4)) is admitted
    by_forecast.add(job("B", 4))
    assert by_forecast.predicted_peak == (15 if risk == 0.1 else 13)


def test_example_normal_bound_of_two_jobs() -> None:
    """At 3 steps the mean is 11 and the deviation 4: 17.58, the highest; too wide for so few."""
    half = NUM_SCENARIOS // 2
    spread = MemorySpread.of(np.array([5, 4]), np.stack([np.repeat([2, 6], half), np.full(NUM_SCENARIOS, 3)]), 1)
    assert spread.mean[2] == 11
    assert spread.variance[2] == 16
    bound = spread.mean + 1.645 * np.sqrt(spread.variance)
    assert bound.max() == bound[2] == pytest.approx(17.58)
    assert spread.peak(1.645) == 18


@settings(max_examples=60, deadline=None)
@given(
    laws=st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=40), min_size=1, max_size=6),
    width=st.integers(3, 9),
)
def test_intervals_never_hide_memory(laws: list[list[int]], width: int) -> None:
    """Mean by intervals is at least the mean at every step inside them; of one step each it is exact."""
    rng = np.random.default_rng(len(laws))
    base = rng.integers(1, 50, len(laws))
    points = np.stack([np.sort(rng.choice(law, NUM_SCENARIOS)) for law in laws])
    spread = MemorySpread.of(base, points, width)
    for t in range(1, 301):
        exact = sum(float((b + t) * (r >= t).mean()) for b, r in zip(base, points, strict=True))
        assert spread.mean[(t - 1) // width] >= exact - 1e-9
    short = np.minimum(points, NUM_INTERVALS)
    spread = MemorySpread.of(base, short, 1)
    for t in range(1, NUM_INTERVALS + 1):
        alive = [float((r >= t).mean()) for r in short]
        assert spread.mean[t - 1] == pytest.approx(sum((b + t) * s for b, s in zip(base, alive, strict=True)))
        variance = sum((b + t) ** 2 * s * (1 - s) for b, s in zip(base, alive, strict=True))
        assert spread.variance[t - 1] == pytest.approx(variance)


def random_batch(seed: int, n: int) -> tuple[dict[str, list[float]], list[Job]]:
    rng = np.random.default_rng(seed)
    laws = {str(i): rng.gamma(2, 100, rng.integers(1, 70)).tolist() for i in range(n)}
    return laws, [job(str(i), int(rng.integers(1, 200))) for i in range(n)]


@pytest.mark.parametrize("n", [2, 10, 29, 30, 31, 80])
def test_adding_one_by_one_is_beginning_with_all(n: int) -> None:
    laws, jobs = random_batch(n, n)
    whole, one_by_one = admission(laws), admission(laws)
    whole.begin(jobs, 10**6)
    one_by_one.begin(jobs[:1], 10**6)
    for each in jobs[1:]:
        assert one_by_one.admits(each)
        one_by_one.add(each)
        one_by_one.check_integrity()
    assert abs(whole.predicted_peak - one_by_one.predicted_peak) <= 1
    exact = whole.predicted_peak
    whole.begin(jobs[:-1], exact)
    assert whole.admits(jobs[-1])
    whole.begin(jobs[:-1], exact - 1)
    assert not whole.admits(jobs[-1])


@pytest.mark.parametrize("n", [12, 29, 60])
def test_overflow_is_about_as_rare_as_asked_for(n: int) -> None:
    """The bound is exceeded by fresh draws of the same laws about as often as the risk says, and not twice as high."""
    laws, jobs = random_batch(5, n)
    by_forecast = admission(laws, risk=0.1)
    by_forecast.begin(jobs, 10**6)
    rng = np.random.default_rng(9)
    drawn = np.stack([np.ceil(rng.choice(laws[each.request_id], 4000)) for each in jobs], axis=1).astype(np.int64)
    peaks = future_memory(np.array([each.known_len for each in jobs]), drawn)
    assert (peaks > by_forecast.predicted_peak).mean() < 0.25
    assert by_forecast.predicted_peak < 1.25 * np.quantile(peaks, 0.9)


def test_a_longer_candidate_stretches_the_time_ahead() -> None:
    laws = {str(i): [10.0] for i in range(LARGE_BATCH)} | {"long": [5000.0]}
    by_forecast = admission(laws)
    by_forecast.begin([job(str(i), 10) for i in range(LARGE_BATCH)], 6000)
    assert by_forecast.predicted_peak == LARGE_BATCH * 20
    assert by_forecast.admits(job("long", 900))
    assert not by_forecast.admits(job("long", 1001))
    by_forecast.add(job("long", 900))
    by_forecast.check_integrity()
    assert 5900 <= by_forecast.predicted_peak <= 5900 + 5000 / NUM_INTERVALS + 1


def test_into_an_empty_batch_goes_what_can_make_a_step() -> None:
    by_forecast = admission({"A": [500.0]})
    by_forecast.begin([], 21)
    assert by_forecast.predicted_peak == 0
    assert by_forecast.admits(job("A", 20))
    assert not by_forecast.admits(job("A", 21))
    by_forecast.add(job("A", 20))
    assert not by_forecast.admits(job("A", 1))


def test_laws_are_read_beyond_what_is_generated_and_up_to_the_limit() -> None:
    by_forecast = admission({"A": [30.0, 700.0]}, risk=0.5)
    by_forecast.begin([job("A", 5, generated=20, limit=50)], 1000)
    assert by_forecast.predicted_peak == 5 + 30
    certain = admission({"A": [30.0, 700.0]})
    certain.begin([job("A", 5, generated=20, limit=50)], 1000)
    assert certain.predicted_peak == 5 + 50


@pytest.mark.parametrize(("risk", "num_above"), [(0.02, 0), (0.05, 1), (0.0625, 2), (0.5, 16)])
def test_at_most_the_risk_is_above_the_bound(risk: float, num_above: int) -> None:
    by_forecast = admission({"A": list(range(1, NUM_SCENARIOS + 1))}, risk)
    by_forecast.begin([job("A", 100)], 1000)
    assert by_forecast.predicted_peak == 100 + NUM_SCENARIOS - num_above


@pytest.mark.parametrize(
    ("law", "generated", "limit", "remaining"),
    [(list(range(1, 65)), 0, 100, 64), ([5], 20, 50, 1), ([90], 50, 50, 1), ([7.2], 0, 50, 8), ([30], 10, 25, 15)],
)
def test_the_longest_that_a_law_leaves(law: list[float], generated: int, limit: int, remaining: int) -> None:
    by_forecast = admission({"A": law}, risk=0.01)
    by_forecast.begin([job("A", 100, generated, limit)], 1000)
    assert by_forecast.predicted_peak == 100 + generated + remaining


def test_intervals_are_no_wider_than_needed() -> None:
    names = [str(i) for i in range(LARGE_BATCH)]
    by_forecast = admission({name: [2.0 * NUM_INTERVALS - 1] for name in names})
    by_forecast.begin([job(name, 10) for name in names], 10**6)
    assert by_forecast.predicted_peak == LARGE_BATCH * (10 + 2 * NUM_INTERVALS)


def test_less_risk_asks_for_more_room() -> None:
    laws, jobs = random_batch(1, 60)
    for n in (20, 60):
        peaks = []
        for risk in (0.01, 0.05, 0.2, 0.5):
            by_forecast = admission(laws, risk)
            by_forecast.begin(jobs[:n], 10**6)
            peaks.append(by_forecast.predicted_peak)
        assert peaks == sorted(peaks, reverse=True)
        assert peaks[0] > peaks[-1]


def test_same_seed_same_scenarios() -> None:
    laws, jobs = random_batch(2, 15)
    peaks = []
    for seed in (1, 1, *range(2, 12)):
        by_forecast = admission(laws, seed=seed)
        by_forecast.begin(jobs, 10**6)
        peaks.append(by_forecast.predicted_peak)
    assert peaks[0] == peaks[1]
    assert len(set(peaks)) > 1


def test_each_law_is_asked_for_once_a_point() -> None:
    laws, jobs = random_batch(4, 40)
    asked: list[str] = []

    def law(each: Job) -> FloatArray:
        asked.append(each.request_id)
        return np.array(laws[each.request_id])

    by_forecast = ForecastAdmission(law, np.random.default_rng(0))
    for num_running in (3, 29, 35):
        by_forecast.begin(jobs[:num_running], 10**6)
        for _ in range(2):
            by_forecast.admits(jobs[-2])
            by_forecast.admits(jobs[-1])
        by_forecast.add(jobs[-2])
        by_forecast.admits(jobs[-1])
        assert by_forecast.predicted_peak > 0
        assert asked == [each.request_id for each in (*jobs[:num_running], *jobs[-2:])]
        asked.clear()


def test_a_job_keeps_its_scenarios_while_it_is_seen() -> None:
    """Whatever its place in the batch: the same jobs in another order, or after others have left, give the same."""
    laws, jobs = random_batch(6, 15)
    by_forecast = admission(laws)
    by_forecast.begin(jobs, 10**6)
    peak = by_forecast.predicted_peak
    by_forecast.begin(jobs[::-1], 10**6)
    assert by_forecast.predicted_peak == peak
    by_forecast.begin(jobs[:5], 10**6)
    for each in jobs[5:]:
        by_forecast.add(each)
    assert by_forecast.predicted_peak == peak
    by_forecast.begin([], 10**6)
    by_forecast.begin([], 10**6)  # no job is remembered for ever
    peaks = set()
    for _ in range(6):
        by_forecast.begin([], 10**6)
        by_forecast.begin([], 10**6)
        by_forecast.begin(jobs, 10**6)
        peaks.add(by_forecast.predicted_peak)
    assert len(peaks) > 1


def test_nothing_is_reserved_and_four_may_be_passed_over() -> None:
    by_forecast = admission(LAWS)
    assert by_forecast.reserve(100) == 0
    assert by_forecast.max_skips == 4
    by_forecast.learn(3, censored=False)


def test_drifted_sums_are_found() -> None:
    laws, jobs = random_batch(3, 40)
    by_forecast = admission(laws)
    by_forecast.begin(jobs, 10**6)
    assert by_forecast.predicted_peak > 0
    by_forecast.check_integrity()
    by_forecast._base[0] += 50
    with pytest.raises(IntegrityError):
        by_forecast.check_integrity()


@pytest.mark.parametrize("risk", [0.0, 0.51, -0.1])
def test_bad_parameters_are_refused(risk: float) -> None:
    with pytest.raises(InvalidValueError, match="eviction_risk"):
        admission(LAWS, risk)
