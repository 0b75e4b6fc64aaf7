"""Steps that are cut off: their time counts, their work does not, and who was cut off waits for another plan."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kvcache import BatchLimits, BlockManager, LeaseExecutor
from tests.unit.kvcache.plans import plan, slot


def executor(max_num_seqs: int = 1) -> LeaseExecutor:
    return LeaseExecutor(BlockManager(16, 4), BatchLimits(max_num_seqs, 64), "w")


def test_a_step_is_cut_off_when_the_first_of_its_sequences_has_used_up_its_seconds() -> None:
    worker = executor(max_num_seqs=2)
    worker.apply_plan(plan(1, replace(slot("a"), cut_off_at_s=0.5), replace(slot("b"), cut_off_at_s=0.3)))
    batch = worker.next_batch()
    assert batch is not None and batch.cut_off_s == pytest.approx(0.3)
    worker.cut_off(batch, 0.2)  # a device that made up for a late host
    worker.check_integrity()
    for each in worker.report().progress:
        assert (each.computed_len, each.output_len) == (0, 0) and each.ran_s == pytest.approx(0.3)
    following = worker.next_batch()
    assert following is not None and [item.request_id for item in following.items] == ["a"]
    assert following.cut_off_s == pytest.approx(0.2) and following.items[0].start == 0
    assert worker.out_of_grants and worker.num_cut_off == 1


def test_who_was_cut_off_waits_for_a_plan_and_who_was_not_goes_on() -> None:
    worker = executor()
    worker.apply_plan(plan(1, replace(slot("a"), cut_off_at_s=0.1)))
    batch = worker.next_batch()
    assert batch is not None
    worker.cut_off(batch, 0.1)
    assert worker.next_batch() is None and worker.out_of_grants
    worker.apply_plan(plan(2, replace(slot("a", payload=False), cut_off_at_s=0.1)))  # written before it was known
    assert worker.next_batch() is None
    worker.apply_plan(plan(3, replace(slot("a", payload=False), cut_off_at_s=0.4)))
    batch = worker.next_batch()
    assert batch is not None and batch.cut_off_s == pytest.approx(0.3)
    worker.commit(batch, duration_s=0.5)  # it ended in time to be booked, beyond its seconds
    batch = worker.next_batch()
    assert batch is not None and batch.cut_off_s == math.inf  # it goes on, as beyond other grants


@pytest.mark.parametrize("ran_s", [0.2, 0.0])
def test_rounding_leaves_none_of_the_seconds_that_are_over(ran_s: float) -> None:
    """0.2 + (0.9 - 0.2) is 1.1e-16 less than 0.9: what is left would be a step of no length, again and again."""
    worker = executor()
    worker.apply_plan(plan(1, replace(slot("a"), cut_off_at_s=0.9)))
    batch = worker.next_batch()
    assert batch is not None
    if ran_s:
        worker.commit(batch, duration_s=ran_s)
        batch = worker.next_batch()
    assert batch is not None and batch.cut_off_s == 0.9 - ran_s
    worker.cut_off(batch, batch.cut_off_s)
    assert worker.next_batch() is None
    assert [each.ran_s for each in worker.report().progress] == [0.9]


def test_without_seconds_nothing_is_cut_off_and_steps_are_got_ready() -> None:
    worker = executor()
    worker.apply_plan(plan(1, slot("a")))
    for _ in range(2):
        batch = worker.next_batch()
        assert batch is not None and batch.cut_off_s == math.inf
        worker.commit(batch)
    assert batch is not None and worker.step_after(batch) is not None
    worker.apply_plan(plan(2, replace(slot("a", payload=False), cut_off_at_s=9.0)))
    batch = worker.next_batch()
    assert batch is not None and worker.step_after(batch) is None
