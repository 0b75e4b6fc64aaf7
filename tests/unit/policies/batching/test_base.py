"""Formed batches, their queue, and vanilla FCFS batches."""

from __future__ import annotations

import math

import pytest

from core.errors import IntegrityError, InvalidValueError
from policies.batching.base import BatchQueue, FormedBatch, first_arrived, first_sealed, predicted_len
from policies.batching.fcfs import FcfsBatches, vanilla_batch_size
from tests.unit.policies.batch_jobs import drain, exercise, make_job, names

GIB = 2**30


@pytest.mark.parametrize(
    ("mean", "limit", "output_len", "expected"),
    [
        (10.0, 100, 0, 10),
        (10.1, 100, 0, 11),
        (0.0, 100, 0, 1),
        (500.0, 100, 0, 100),
        (math.inf, 100, 0, 100),
        (None, 100, 0, 100),
        (10.0, 100, 4, 6),
        (10.0, 100, 12, 1),
    ],
)
def test_predicted_length(mean: float | None, limit: int, output_len: int, expected: int) -> None:
    assert predicted_len(make_job("a", 5, mean, max_new_tokens=limit, output_len=output_len)) == expected


def test_vanilla_batch_size_of_equation_1() -> None:
    """Section 1.2, examples 1 and 2."""
    assert vanilla_batch_size(7 * GIB, 0.4375 * 2**20, 1024, 1024) == 8
    assert vanilla_batch_size(0.8 * GIB, 0.4375 * 2**20, 1024, 1024) == 1  # eq. (1) says 0


@pytest.mark.parametrize(("memory_gib", "expected"), [(13.755, 7), (18.375, 10)])
def test_vanilla_batch_size_of_the_paper_counts_the_cache_twice(memory_gib: float, expected: int) -> None:
    token_bytes = 2 * 28 * 4096 * 2
    assert vanilla_batch_size(memory_gib * GIB, token_bytes, 1024, 1024, delta_factor=2) == expected
    assert vanilla_batch_size(memory_gib * GIB, token_bytes, 1024, 1024) > 2 * expected - 1


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("memory_bytes", (0, 1, 1, 1, 1)),
        ("token_bytes", (1, -1, 1, 1, 1)),
        ("delta_factor", (1, 1, 1, 1, 0)),
        ("max_prompt_len", (1, 1, 0, 0, 1)),
    ],
)
def test_vanilla_batch_size_refuses(field: str, values: tuple[float, float, int, int, float]) -> None:
    with pytest.raises(InvalidValueError) as raised:
        vanilla_batch_size(*values)
    assert raised.value.field == field


def test_a_batch_knows_its_lengths_and_keys() -> None:
    batch = FormedBatch(0, created_at=7.0)
    batch.insert(make_job("a", 10, 3, arrived_at=5, priority=1))
    batch.insert(make_job("b", 4, 8, arrived_at=6, priority=0, deadline_at=50))
    batch.insert(make_job("c", 4, 2, arrived_at=1, priority=0, deadline_at=40, output_len=1))
    assert (batch.prompt_len, batch.predicted_len, batch.urgency, batch.arrived_at) == (10, 8, (0, 40), 1)
    assert (batch.prompt_lens, batch.predicted_lens) == ([10, 4, 5], [3, 8, 1])
    assert batch.drop("c")
    assert not batch.drop("c")
    assert (batch.prompt_len, batch.predicted_len, batch.urgency, batch.arrived_at) == (10, 8, (0, 50), 5)
    assert batch.drop("a")
    assert (batch.prompt_len, batch.predicted_len) == (4, 8)
    batch.check_integrity()
    batch.prompt_len = 5
    with pytest.raises(IntegrityError, match="batch 0"):
        batch.check_integrity()


def _put(queue: BatchQueue, *jobs: tuple[str, float, int], sealed_at: float | None = None) -> FormedBatch:
    batch = queue.new_batch(now=0.0, sealed_at=sealed_at)
    for name, arrived_at, priority in jobs:
        batch.insert(make_job(name, 1, 1, arrived_at=arrived_at, priority=priority))
    queue.put(batch)
    return batch


def test_the_queue_gives_the_most_urgent_then_what_is_chosen() -> None:
    queue = BatchQueue(first_arrived)
    _put(queue, ("late", 3, 0))
    _put(queue, ("early", 1, 0))
    _put(queue, ("low", 0, 1))
    _put(queue, ("lifted", 9, 1), ("urgent", 9, -1))
    assert [names(queue.pull(10)) for _ in range(5)] == [["lifted", "urgent"], ["early"], ["late"], ["low"], []]


def test_first_sealed_keeps_the_order_of_sealing_and_gives_halves_the_place_of_the_whole() -> None:
    queue = BatchQueue(first_sealed)
    whole = _put(queue, ("a", 9, 0), ("b", 9, 0), ("c", 9, 0), sealed_at=0.0)
    _put(queue, ("d", 1, 0), sealed_at=5.0)
    _put(queue, ("e", 0, 0), sealed_at=5.0)
    assert queue.pull(6) is whole
    assert queue.split(whole) is None
    assert [names(queue.pull(6)) for _ in range(4)] == [["a", "b"], ["c"], ["d"], ["e"]]


def test_split_halves_are_sealed_keep_arrivals_and_one_alone_has_failed() -> None:
    queue = BatchQueue(first_arrived)
    whole = _put(queue, *((name, 10.0 - index, 0) for index, name in enumerate("abcde")))
    assert whole.insertable
    assert queue.pull(20.0) is whole
    assert whole.sealed_at == 20.0
    assert queue.split(whole) is None
    second, first = queue.pull(30.0), queue.pull(30.0)
    assert second is not None and first is not None
    assert (names(first), names(second)) == (["a", "b", "c"], ["d", "e"])
    assert (first.arrived_at, second.arrived_at) == (8.0, 6.0)
    assert (first.sealed_at, first.insertable, second.insertable) == (20.0, False, False)
    single = _put(queue, ("z", 0, 0))
    assert queue.pull(1) is single
    assert queue.split(single) is single.jobs[0]
    assert queue.num_jobs == 0


def test_remove_takes_an_emptied_batch_along() -> None:
    queue = BatchQueue(first_arrived)
    batch = _put(queue, ("a", 0, 0), ("b", 1, 0))
    assert queue.remove("a") is batch
    assert queue.remove("a") is None
    queue.check_integrity()
    queue.remove("b")
    assert (queue.num_jobs, list(queue), queue.pull(0)) == (0, [], None)
    queue.check_integrity()


def test_the_queue_notices_lost_and_unknown_jobs() -> None:
    queue = BatchQueue(first_arrived)
    batch = _put(queue, ("a", 0, 0), ("b", 0, 0))
    batch.insert(make_job("stray", 1, 1))
    with pytest.raises(IntegrityError, match="stray"):
        queue.check_integrity()
    batch.drop("stray")
    batch.drop("b")
    with pytest.raises(IntegrityError, match="2 jobs are known, 1"):
        queue.check_integrity()
    batch.drop("a")
    with pytest.raises(IntegrityError, match="empty"):
        queue.check_integrity()


def test_fcfs_batches_take_the_oldest_and_wait_for_nobody() -> None:
    batcher = FcfsBatches(3)
    for index, name in enumerate("abcde"):
        batcher.add(make_job(name, 1, 1, arrived_at=index), index)
    batcher.add(make_job("early", 1, 1, arrived_at=-1), 9)
    assert batcher.num_waiting == 6
    batcher.remove("b")
    batcher.remove("unknown")
    assert batcher.next_due_at() is None
    assert drain(batcher, 10) == [["early", "a", "c"], ["d", "e"]]


def test_fcfs_batches_order_by_priority_then_deadline_then_arrival() -> None:
    batcher = FcfsBatches(1)
    batcher.add(make_job("old", 1, 1, arrived_at=0), 0)
    batcher.add(make_job("due", 1, 1, arrived_at=2, deadline_at=9), 2)
    batcher.add(make_job("urgent", 1, 1, arrived_at=3, priority=-1), 3)
    assert drain(batcher, 4) == [["urgent"], ["due"], ["old"]]


def test_fcfs_halves_keep_their_place() -> None:
    batcher = FcfsBatches(4)
    for index, name in enumerate("abcd"):
        batcher.add(make_job(name, 1, 1, arrived_at=index), index)
    batch = batcher.pull(5)
    assert batch is not None
    batcher.add(make_job("new", 1, 1, arrived_at=5), 5)
    batcher.add(make_job("between", 1, 1, arrived_at=1), 5)
    batcher.add(make_job("with a", 1, 1, arrived_at=0), 5)
    assert batcher.split(batch, 6) is None
    batcher.remove("d")
    assert batcher.num_waiting == 6
    assert drain(batcher, 7) == [["a", "b"], ["with a", "between", "new"], ["c"]]


@pytest.mark.parametrize("seed", range(4))
def test_fcfs_batches_lose_nothing(seed: int) -> None:
    exercise(FcfsBatches(3), seed)


def test_fcfs_batches_refuse_size_0() -> None:
    with pytest.raises(InvalidValueError, match="size"):
        FcfsBatches(0)
