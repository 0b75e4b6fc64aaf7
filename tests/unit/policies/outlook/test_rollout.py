"""The queue rolled forward: seats, steps and laws."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from core.costs import A100_7B, StepCost
from core.forecast import QUANTILES, Forecast
from policies.interfaces import Job
from policies.outlook.laws import RemainingLaws, drawn
from policies.outlook.rollout import MAX_LISTED, MAX_TURNS, QueueState, RecentTraffic, RollOut, StepPace, starts

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
