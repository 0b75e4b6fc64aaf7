"""Highest response ratio next, among batches and among jobs."""

from __future__ import annotations

import math
from itertools import islice

import numpy as np
import pytest

from core.costs import StepCost
from policies.batching.base import BatchQueue, FormedBatch
from policies.batching.hrrn import HighestResponseRatio, HrrnOrder, response_ratio
from policies.batching.wma import WmaBatcher
from policies.interfaces import Job
from tests.unit.policies.batch_jobs import drain, exercise, make_job


def tokens_per_second(batch_size: int, prompt_len: int, predicted_len: int) -> float:
    return float(predicted_len)


@pytest.mark.parametrize(
    ("waited_s", "service_s", "expected"),
    [(10, 5, 3), (4, 1, 5), (30, 20, 2.5), (0, 7, 1), (3, 0, math.inf), (3, math.inf, 1)],
)
def test_response_ratio(waited_s: float, service_s: float, expected: float) -> None:
    """Section 1.6 example 1, and the ends of the scale."""
    assert response_ratio(waited_s, service_s) == expected


def _batch(queue: BatchQueue, name: str, waited_s: float, service_s: int, priority: int = 0) -> FormedBatch:
    batch = queue.new_batch(0.0)
    batch.insert(make_job(name, 1, service_s, arrived_at=100 - waited_s, priority=priority))
    queue.put(batch)
    return batch


def test_the_second_of_the_example_goes_first() -> None:
    queue = BatchQueue(HighestResponseRatio(tokens_per_second))
    _batch(queue, "a", 10, 5)
    _batch(queue, "b", 4, 1)
    _batch(queue, "c", 30, 20)
    _batch(queue, "urgent", 0, 1000, priority=-1)
    order = [queue.pull(100) for _ in range(4)]
    assert [batch.jobs[0].request_id for batch in order if batch] == ["urgent", "b", "a", "c"]


def test_equal_ratios_go_by_arrival_then_by_forming() -> None:
    queue = BatchQueue(HighestResponseRatio(tokens_per_second))
    _batch(queue, "late", 10, 5)
    _batch(queue, "early", 20, 10)
    _batch(queue, "late2", 10, 5)
    order = [queue.pull(100) for _ in range(3)]
    assert [batch.jobs[0].request_id for batch in order if batch] == ["early", "late", "late2"]


def test_the_longest_wait_and_the_shape_of_the_whole_batch_count() -> None:
    asked: list[tuple[int, int, int]] = []

    def estimate(*shape: int) -> float:
        asked.append((shape[0], shape[1], shape[2]))
        return 10.0

    choice = HighestResponseRatio(estimate)
    batch = FormedBatch(0, 0.0)
    batch.insert(make_job("a", 7, 3, arrived_at=40))
    batch.insert(make_job("b", 5, 9, arrived_at=20))
    assert choice.ratio(batch, 100) == 9
    assert asked == [(2, 7, 9)]


def test_a_long_batch_is_not_starved_by_short_ones() -> None:
    batcher = WmaBatcher(1e9, HighestResponseRatio(tokens_per_second), 1)
    batcher.add(make_job("long", 1, 50, arrived_at=0), 0)
    served = []
    for now in range(1, 120):  # a short one comes every second, and one batch a second is pulled
        batcher.add(make_job(f"short{now}", 1, 1, arrived_at=now - 1), now)
        batch = batcher.pull(now)
        assert batch is not None
        served.append(batch.jobs[0].request_id)
    # Short ones are pulled with R = 2; the long one has that ratio at 50 s, and came first.
    assert served.index("long") == 49


@pytest.mark.parametrize("seed", range(6))
def test_batches_lose_nothing_under_hrrn(seed: int) -> None:
    exercise(WmaBatcher(150, HighestResponseRatio(tokens_per_second), 300), seed)


def test_a_pull_asks_for_one_estimate_per_batch() -> None:
    asked: list[int] = []

    def estimate(batch_size: int, prompt_len: int, predicted_len: int) -> float:
        asked.append(predicted_len)
        return 1.0

    batcher = WmaBatcher(1e9, HighestResponseRatio(estimate), 1)
    for length in (5, 50, 500):
        batcher.add(make_job(str(length), 1, length), 0)
    batcher.pull(1)
    assert sorted(asked) == [5, 50, 500]


def test_magnus_runs_the_small_batch_of_figure_6_first() -> None:
    batcher = WmaBatcher(1e9, HighestResponseRatio(tokens_per_second))
    for index in range(21):
        length = 10 if index % 7 else 1000
        batcher.add(make_job(str(index), length, length, arrived_at=index), index)
    assert [len(batch) for batch in drain(batcher, 21)] == [18, 3]


def _order(jobs: list[Job]) -> HrrnOrder:
    order = HrrnOrder(
        lambda cost, job: cost.decode_s(0) * (job.max_new_tokens - job.output_len), StepCost(0.0, 0.0, 1.0, 0.0)
    )
    for job in jobs:
        order.add(job, job.arrived_at)
    return order


def _job(name: str, waited_s: float, remaining_s: int, priority: int = 0, deadline_at: float = math.inf) -> Job:
    return Job(name, 100 - waited_s, 1, remaining_s, priority, deadline_at)


def test_order_of_jobs() -> None:
    order = _order([_job("a", 10, 5), _job("b", 4, 1), _job("c", 30, 20)])
    assert [job.request_id for job in order.ranked(100)] == ["b", "a", "c"]
    # By 400 the waits differ little, so the shortest go first.
    assert [job.request_id for job in order.ranked(400)] == ["b", "a", "c"]
    assert not order.preemptive
    assert order.slice_s(_job("a", 1, 1)) == math.inf


def test_ranks_follow_time_and_progress() -> None:
    short, long = _job("short", 0, 10), _job("long", 60, 40)
    order = _order([short, long])
    assert [job.request_id for job in order.ranked(100)] == ["long", "short"]
    assert [job.request_id for job in order.ranked(130)] == ["short", "long"]  # 1 + 30/10 over 1 + 90/40
    long.output_len = 39
    order.changed(long)
    order.ran(long, 1.0, 130)
    order.refresh(130)
    assert [job.request_id for job in order.ranked(130)] == ["long", "short"]


def test_the_story_of_a_choice_has_the_rivals_ratios() -> None:
    """R = (T_q + T_s) / T_s: 3 of the chosen one, 2 and 1.5 of the others."""
    queue = BatchQueue(choice := HighestResponseRatio(tokens_per_second))
    chosen = _batch(queue, "a", waited_s=20, service_s=10)
    _batch(queue, "b", waited_s=10, service_s=20)
    _batch(queue, "c", waited_s=10, service_s=10)
    assert queue.pull(100) is chosen
    story = choice.story(chosen, queue, 100)
    assert story == {"queued_s": 20, "service_s": 10, "response_ratio": 3, "rival_ratios": "2.00, 1.50"}


def test_urgency_comes_before_the_ratio() -> None:
    order = _order([_job("ratio", 99, 1), _job("due", 0, 100, 0, 500), _job("urgent", 0, 100, -1)])
    assert [job.request_id for job in order.ranked(100)] == ["urgent", "due", "ratio"]


def test_jobs_of_equal_ratio_go_by_arrival_then_by_joining() -> None:
    order = _order([_job("late", 10, 5), _job("early", 20, 10), _job("late2", 10, 5)])
    assert [job.request_id for job in order.ranked(100)] == ["early", "late", "late2"]


def test_removed_jobs_are_gone_and_unknown_ones_are_fine() -> None:
    jobs = [_job("a", 1, 1), _job("b", 1, 1)]
    order = _order(jobs)
    order.remove(jobs[0])
    order.remove(jobs[0])
    assert list(order.ranked(100)) == [jobs[1]]


@pytest.mark.parametrize("seed", range(10))
def test_ranked_equals_sorting_by_the_formula(seed: int) -> None:
    rng = np.random.default_rng(seed)
    jobs = [_job(str(i), float(rng.integers(0, 50)), int(rng.integers(1, 30)), int(rng.integers(2))) for i in range(40)]
    ranked = list(islice(_order(jobs).ranked(100), 15))
    by_formula = sorted(
        jobs,
        key=lambda job: (
            job.priority,
            -((100 - job.arrived_at) / job.max_new_tokens),
            job.arrived_at,
        ),
    )
    assert ranked == by_formula[:15]
