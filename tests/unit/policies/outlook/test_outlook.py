"""Promises: the queue rolled forward, the correction of predicted quantiles, and what a job alone is told."""

from __future__ import annotations

import heapq
import math

import numpy as np
import pytest

from farsight.core.costs import A100_7B, StepCost
from farsight.core.forecast import QUANTILES, Forecast
from farsight.policies.interfaces import Job
from farsight.policies.outlook.calibration import MIN_ALL, WINDOW, OnlineCalibration, Raw, survival_quantile
from farsight.policies.outlook.promises import PromiseMaker, ReplicaJobs
from farsight.policies.outlook.rollout import (
    MAX_LISTED,
    MAX_TURNS,
    QueueState,
    RecentTraffic,
    RemainingLaws,
    RollOut,
    StepPace,
    drawn,
    starts,
)

FLAT = StepCost(base_s=0.01, prefill_token_s=0.0, decode_seq_s=0.0, context_token_s=0.0)
IDLE = RecentTraffic(rate=0.0, running=1.0, output_len=100.0, prefill_s=0.0)


def certain(length: int) -> Forecast:
    return Forecast(float(length), (float(length),) * len(QUANTILES), 1, "oracle", 1)


def job(name: str, length: int, *, output_len: int = 0, runs: bool = False) -> Job:
    made = Job(name, 0.0, 10, 4096, forecast=certain(length), output_len=output_len)
    made.computed_len = made.known_len - 1 if runs else 0
    return made


def state(running: list[Job], waiting: list[Job], num_waiting: int | None = None) -> QueueState:
    return QueueState(running, waiting, len(waiting) if num_waiting is None else num_waiting, 8, FLAT, IDLE)


def test_seats_are_taken_in_the_order_of_the_queue() -> None:
    rng = np.random.default_rng(1)
    seats, waiting = rng.integers(1, 100, (5, 16)).astype(float), rng.integers(1, 100, (MAX_TURNS, 16)).astype(float)
    found = starts(seats, waiting)
    for scenario in range(16):
        heap = list(seats[:, scenario])
        heapq.heapify(heap)
        for place in range(len(waiting)):
            begins = heapq.heappop(heap)
            assert found[place, scenario] == begins
            heapq.heappush(heap, begins + waiting[place, scenario])


def test_a_long_queue_begins_in_a_bounded_number_of_turns_and_about_as_soon() -> None:
    rng = np.random.default_rng(2)
    seats, waiting = rng.uniform(1, 100, (50, 16)), rng.uniform(1, 100, (MAX_LISTED, 16))
    exact = np.concatenate([starts(seats, waiting[:MAX_TURNS]), np.zeros((0, 16))])
    grouped = starts(seats, waiting)
    assert grouped.shape == waiting.shape
    assert np.abs(grouped[:MAX_TURNS].mean(axis=1) - exact.mean(axis=1)).max() < 5.0
    assert (np.diff(grouped.mean(axis=1)) > -10.0).all()


def test_known_lengths_give_the_exact_end() -> None:
    running = [job(f"r{i}", 100, output_len=40, runs=True) for i in range(8)]
    first, second = job("first", 50), job("second", 50)
    roll_out = RollOut(state(running, [first, second]), RemainingLaws())
    (left_s,) = set(np.round(roll_out.end_s(running[0], waits=False), 9))
    assert left_s == pytest.approx(60 * 0.01)
    for each in (first, second):
        ends_s = roll_out.end_s(each, waits=True)
        assert ends_s == pytest.approx(0.01 * (60 + 50) + FLAT.prefill_s(10))


def test_one_behind_the_listed_ends_later_than_the_last_of_them() -> None:
    running = [job(f"r{i}", 100, runs=True, output_len=1) for i in range(8)]
    waiting = [job(f"w{i}", 100) for i in range(MAX_LISTED)]
    far = job("far", 100)
    long = state(running, waiting, num_waiting=10 * MAX_LISTED)
    roll_out = RollOut(long, RemainingLaws())
    assert long.is_coarse and not state(running, waiting).is_coarse
    assert roll_out.end_s(far, waits=True).mean() > 5 * roll_out.end_s(waiting[-1], waits=True).mean()


def test_equal_states_give_equal_answers() -> None:
    def answer() -> list[float]:
        running = [job(f"r{i}", 100 + 7 * i, output_len=3 * i, runs=True) for i in range(200)]
        waiting = [job(f"w{i}", 10 + i) for i in range(100)]
        return [float(x) for x in RollOut(state(running, waiting), RemainingLaws()).end_s(waiting[-1], waits=True)]

    assert answer() == answer()


def test_newcomers_prompts_slow_steps_down_and_a_queue_bounds_how_many_come() -> None:
    running = [job(f"r{i}", 100, output_len=1, runs=True) for i in range(4)]
    busy = RecentTraffic(rate=10.0, running=4.0, output_len=100.0, prefill_s=0.05)
    alone = QueueState(running, (), 0, 8, A100_7B, IDLE)
    beside = QueueState(running, (), 0, 8, A100_7B, busy)
    queued = QueueState(running, (), 5, 8, A100_7B, busy)
    seconds = [float(StepPace(each).decode_s(np.array([100.0]))[0]) for each in (alone, queued, beside)]
    assert seconds[0] < seconds[1] < seconds[2]
    assert seconds[2] == pytest.approx(seconds[0] * 2, rel=0.1), "half of the time goes to prompts"


def test_draws_follow_the_law() -> None:
    laws = RemainingLaws()
    forecast = Forecast(50.0, (10.0, 20.0, 40.0, 60.0, 90.0, 200.0), 1, "noisy", 1)
    tokens, weights = laws.remaining([Job("a", 0.0, 10, 1000, forecast=forecast)])
    levels = np.array([[0.1, 0.25, 0.5, 0.75, 0.9]])
    assert drawn(tokens, weights, levels)[0] == pytest.approx([10, 20, 40, 60, 90], rel=0.15)


def test_without_forecast_and_history_every_length_up_to_the_limit_is_possible() -> None:
    tokens, weights = RemainingLaws().remaining([Job("a", 0.0, 10, 1000)])
    assert float((tokens * weights).sum()) == pytest.approx(500, rel=0.05)


def test_a_new_history_changes_the_laws_of_jobs_that_are_here() -> None:
    laws, here = RemainingLaws(), Job("a", 0.0, 10, 1000)
    laws.remaining([here])
    for number in range(20):
        laws.learn(Job(str(number), 0.0, 10, 1000, output_len=30), censored=False)
    tokens, weights = laws.remaining([here])
    assert float((tokens * weights).sum()) == pytest.approx(30)


def test_coverage_holds_whatever_the_prediction_is_wrong_by() -> None:
    rng, calibration = np.random.default_rng(3), OnlineCalibration()
    below = []
    for number in range(2500):
        now = float(10_000 * number)
        raw = Raw(7.0, 8.0, waits=False)  # far too short, and far too sure
        below.append([*calibration.corrected(raw, now)])
        took_s = float(rng.lognormal(3.0, 1.0))
        below[-1] = [took_s <= limit for limit in below[-1]]
        calibration.begin(str(number), raw, now)
        calibration.end(str(number), now + took_s)
    p50, p90 = np.mean(below[WINDOW:], axis=0)
    assert p50 == pytest.approx(0.5, abs=0.03) and p90 == pytest.approx(0.9, abs=0.02)


def test_few_ends_correct_no_median_but_widen_the_interval() -> None:
    calibration = OnlineCalibration()
    assert calibration.corrected(Raw(1.0, 2.0, waits=False), 0.0) == (1.0, 2.0)
    for number in range(MIN_ALL - 1):
        calibration.begin(str(number), Raw(1.0, 2.0, waits=False), 0.0)
        calibration.end(str(number), 50.0)
    assert calibration.corrected(Raw(1.0, 2.0, waits=False), 50.0) == (1.0, 50.0)


@pytest.mark.parametrize(("first", "then"), [(1.0, 10.0), (10.0, 1.0)])
def test_after_a_change_of_load_the_next_hundred_hold_again(first: float, then: float) -> None:
    rng, calibration, raw, now = np.random.default_rng(5), OnlineCalibration(), Raw(10.0, 14.0, waits=False), 0.0
    below = []
    for number in range(700):
        p50_s, p90_s = calibration.corrected(raw, now)
        took_s = 10.0 * (first if number < 500 else then) * float(rng.lognormal(0.0, 0.4))
        below.append((took_s <= p50_s, took_s <= p90_s))
        calibration.begin(str(number), raw, now)
        calibration.end(str(number), now + took_s)
        now += took_s + 1.0
    p50, p90 = np.mean(below[600:], axis=0)
    assert 0.35 <= p50 <= 0.65 and p90 >= 0.85


@pytest.mark.parametrize("waits", [False, True])
def test_an_interval_is_never_narrower_than_what_the_last_hundred_showed(waits: bool) -> None:
    """A prediction of a kind of its own that is sure of itself, after a hundred that were wrong by up to three."""
    calibration = OnlineCalibration()
    spread = np.geomspace(1 / 3, 3.0, 101)[1:]
    for number, factor in enumerate(spread):
        calibration.begin(str(number), Raw(10.0, 40.0, waits=False), 100.0 * number)
        calibration.end(str(number), 100.0 * number + 10.0 * float(factor))
    p50_s, p90_s = calibration.corrected(Raw(150.0, 150.5, waits=waits), 1e5)
    assert p90_s / p50_s >= float(np.quantile(spread, 0.9)) * 0.95


def test_answers_that_become_late_widen_the_interval_within_a_few() -> None:
    rng, calibration, raw, now = np.random.default_rng(5), OnlineCalibration(), Raw(10.0, 14.0, waits=False), 0.0
    held, widths = [], []
    for number in range(520):
        p50_s, p90_s = calibration.corrected(raw, now)
        took_s = (10.0 if number < 500 else 100.0) * float(rng.lognormal(0.0, 0.4))
        held.append(took_s <= p90_s)
        widths.append(p90_s / p50_s)
        calibration.begin(str(number), raw, now)
        calibration.end(str(number), now + took_s)
        now += took_s + 1.0
    assert np.mean(held[200:500]) == pytest.approx(0.9, abs=0.03) and max(widths[200:500]) < 2.5
    assert not any(held[500:503]) and np.mean(held[503:]) >= 0.7


def test_jobs_that_are_past_what_they_were_told_widen_the_next_interval() -> None:
    """151 s were told, and after 400 s no token has come."""
    calibration, raw = OnlineCalibration(), Raw(151.0, 152.0, waits=True)
    for number in range(40):
        calibration.begin(str(number), raw, 0.0)
    for number in range(10):
        calibration.end(str(number), 151.5)
    p50_s, p90_s = calibration.corrected(raw, 400.0)
    assert p50_s == pytest.approx(151.0) and p90_s >= 400.0, "no end has shown more, but thirty are past it"
    for number in range(10, 16):
        calibration.end(str(number), 400.0 + number)
    p50_s, p90_s = calibration.corrected(raw, 420.0)
    assert p90_s >= 400.0


def test_what_a_job_took_before_the_last_hundred_ends_is_the_past() -> None:
    """Left truncation: nine that lasted 100 each began long ago, and say nothing of the first 90."""
    values = np.array([*np.linspace(1.0, 2.0, 11), *[100.0] * 9])
    exact, entered = np.ones(20, np.bool_), np.array([0.0] * 11 + [90.0] * 9)
    assert survival_quantile(values, exact, 0.5) == pytest.approx(1.95, abs=0.1)
    assert survival_quantile(values, exact, 0.5, entered) == pytest.approx(1.5, abs=0.1)


def test_kinds_are_corrected_by_themselves() -> None:
    calibration = OnlineCalibration()
    short, long = Raw(1.0, 2.0, waits=False), Raw(64.0, 90.0, waits=True)
    for number in range(100):
        for name, raw, took_s in (("s", short, 3.0), ("l", long, 32.0)):
            calibration.begin(f"{name}{number}", raw, 0.0)
            calibration.end(f"{name}{number}", took_s)
    assert calibration.corrected(short, 100.0)[0] == pytest.approx(3.0)
    assert calibration.corrected(long, 100.0)[0] == pytest.approx(32.0)


def test_jobs_that_go_on_count_by_their_age() -> None:
    """Half of the jobs take long and none of these has ended: without them the median would be that of the short."""
    calibration, raw = OnlineCalibration(), Raw(10.0, 20.0, waits=False)
    for number in range(200):
        calibration.begin(str(number), raw, 0.0)
        if number % 2:
            calibration.end(str(number), 10.0 + number / 100)
    without = calibration.corrected(raw, 10.0)
    later = calibration.corrected(raw, 500.0)
    assert without[0] == pytest.approx(11.0, abs=0.1)
    assert later[1] >= later[0] >= 11.9


def test_jobs_that_left_before_their_end_say_nothing() -> None:
    calibration, raw = OnlineCalibration(), Raw(10.0, 20.0, waits=False)
    for number in range(100):
        calibration.begin(str(number), raw, 0.0)
        if number % 2:
            calibration.end(str(number), 30.0)
        else:
            calibration.drop(str(number))
    calibration.drop("unknown")
    assert calibration.corrected(raw, 1e6)[0] == pytest.approx(30.0)


def test_quantiles_of_exact_values_are_those_of_the_sample() -> None:
    values = np.arange(1.0, 100.0)
    exact = np.ones(99, np.bool_)
    assert survival_quantile(values, exact, 0.5) == pytest.approx(50.0)
    assert survival_quantile(values, exact, 0.9) == pytest.approx(90.0)


COST = StepCost(0.01, 0.0005, 0.01, 0.0)
PLACES = 16


def promised_job(name: str) -> Job:
    forecast = Forecast(50.0, (50.0,) * len(QUANTILES), 1, "test", 1)
    return Job(name, 0.0, 20, 400, 0, math.inf, forecast)


@pytest.mark.parametrize("pause_s", [60.0, 600.0])
def test_after_a_burst_a_request_alone_is_told_what_it_takes_alone(pause_s: float) -> None:
    """It takes about 1 s; beside sixteen others it takes 8.5 s, and longer while their prompts are computed."""
    maker, beside = PromiseMaker(PLACES), [promised_job(f"r{number}") for number in range(PLACES)]
    burst = [promised_job(f"b{number}") for number in range(200)]
    for number, each in enumerate(burst):
        maker.promise([each], ReplicaJobs(beside, [], 0), COST, 0.02 * number)
    for each in burst:
        each.output_len = 50
        maker.ended(each, 13.0, censored=False)
    maker.calibration = OnlineCalibration()
    alone = promised_job("alone")
    (told,) = maker.promise([alone], ReplicaJobs([alone], [], 0), COST, 13.0 + pause_s)
    assert 1.0 < told.p50_s < 2.0, "the past burst counts no more"
