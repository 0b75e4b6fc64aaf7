"""Highest response ratio next, among batches and among jobs."""

from __future__ import annotations

import math

import pytest

from policies.batching.base import BatchQueue, FormedBatch
from policies.batching.hrrn import HighestResponseRatio, response_ratio
from policies.batching.wma import WmaBatcher
from tests.unit.policies.batch_jobs import exercise, make_job


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


@pytest.mark.parametrize("seed", range(3))
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


def test_the_story_of_a_choice_has_the_rivals_ratios() -> None:
    """R = (T_q + T_s) / T_s: 3 of the chosen one, 2 and 1.5 of the others."""
    queue = BatchQueue(choice := HighestResponseRatio(tokens_per_second))
    chosen = _batch(queue, "a", waited_s=20, service_s=10)
    _batch(queue, "b", waited_s=10, service_s=20)
    _batch(queue, "c", waited_s=10, service_s=10)
    assert queue.pull(100) is chosen
    story = choice.story(chosen, queue, 100)
    assert story == {"queued_s": 20, "service_s": 10, "response_ratio": 3, "rival_ratios": "2.00, 1.50"}
