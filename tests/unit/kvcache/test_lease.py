"""What a worker does inside a plan, one rule a test."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from farsight.core.request import SequenceStatus
from farsight.kvcache import BatchLimits, BlockManager, LeaseExecutor
from tests.unit.kvcache.plans import plan, slot, step

BLOCK = 4


def executor(num_blocks: int = 16, max_num_seqs: int = 8, max_batch_tokens: int = 64) -> LeaseExecutor:
    return LeaseExecutor(BlockManager(num_blocks, BLOCK), BatchLimits(max_num_seqs, max_batch_tokens), "w")


def test_long_prompts_are_prefilled_in_several_steps_beside_decodes() -> None:
    worker = executor(max_batch_tokens=6, max_num_seqs=2)
    worker.apply_plan(plan(1, slot("a", prompt=4), slot("b", prompt=9), slot("beyond max_num_seqs")))
    assert step(worker) == {"a": (0, 4, True), "b": (0, 2, False)}
    assert step(worker) == {"a": (4, 1, True), "b": (2, 5, False)}
    assert step(worker) == {"a": (5, 1, True), "b": (7, 2, True)}


def test_finished_sequences_are_reported_until_acknowledged() -> None:
    worker = executor()
    worker.apply_plan(plan(1, slot("a", out=1), slot("b", out=2)))
    step(worker)
    assert [end.request_id for end in worker.report().finished] == ["a"]
    step(worker)
    second = worker.report()
    assert [end.request_id for end in second.finished] == ["a", "b"]
    worker.acknowledge(1)
    assert [end.request_id for end in worker.report().finished] == ["b"]
    worker.acknowledge(second.report_seq)
    assert worker.report().finished == ()


def test_grants_are_absolute_bounds() -> None:
    worker = executor()
    worker.apply_plan(plan(1, slot("a", prompt=8, prefill_to=5), slot("b", prompt=4, length_to=6)))
    assert step(worker) == {"a": (0, 5, False), "b": (0, 4, True)}
    assert step(worker) == {"b": (4, 1, True)}
    worker.apply_plan(plan(2, slot("a", prefill_to=5, payload=False), slot("b", length_to=8, payload=False)))
    assert step(worker) == {"b": (5, 1, True)}, "the same grant again grants nothing; a larger one does"


def test_without_grants_and_without_a_plan_it_runs_fcfs() -> None:
    worker = executor()
    worker.apply_plan(plan(1, slot("a", length_to=4), slot("b", length_to=4)))
    assert step(worker) == {"a": (0, 3, False), "b": (0, 3, False)}
    assert step(worker) == {"a": (3, 1, True), "b": (3, 1, True)}
    worker.stall(frozenset({"a"}))
    assert step(worker) == {"b": (4, 1, True)}, "who is stalled is not woken by that"


def test_a_standby_starts_only_in_the_place_of_an_ended_slot() -> None:
    worker = executor()
    worker.apply_plan(plan(1, slot("a", out=1), slot("b", out=9), slot("s", standby=True), slot("t", standby=True)))
    assert set(step(worker)) == {"a", "b"}
    assert set(step(worker)) == {"b", "s"}
    assert set(step(worker, stopped=("s",))) == {"b", "s"}
    assert set(step(worker)) == {"b", "t"}, "the standby's own end leaves one place, not two"
    worker = executor()
    given = slot("a", out=1), slot("s", standby=True), slot("t", standby=True)
    worker.apply_plan(plan(1, *given))
    step(worker)
    worker.apply_plan(plan(2, *given, as_of=0))
    worker.stall(frozenset({"s"}))
    assert set(step(worker)) == {"t"}, "the plan did not know of the end; and who is stalled leaves the place"


def test_a_start_respects_the_reserve_but_growth_does_not() -> None:
    worker = executor(num_blocks=4)
    worker.apply_plan(plan(1, slot("a", prompt=8, out=8), slot("b", prompt=4), reserve=2))
    assert set(step(worker)) == {"a"}, "2 free blocks are the reserve"
    assert set(step(worker)) == {"a"}
    assert worker.blocks.num_free == 1
    worker = executor(num_blocks=4)
    worker.apply_plan(plan(1, slot("a", prompt=8), slot("big", prompt=12), slot("small", prompt=4)))
    assert set(step(worker)) == {"a"}, "nothing of lower rank overtakes a start that does not fit"
    worker = executor(num_blocks=4)
    worker.apply_plan(plan(1, slot("a", prompt=8, out=1), slot("b", prompt=4, out=9, resumed=8)))
    assert set(step(worker)) == {"a"}, "b needs 3 blocks at once, for its known output too"
    assert step(worker) == {"b": (0, 12, True)}


def test_pressure_pauses_the_lowest_and_is_reported() -> None:
    worker = executor(num_blocks=3)
    worker.apply_plan(plan(1, slot("a", prompt=4, out=8), slot("b", prompt=4, out=8)))
    assert set(step(worker)) == {"a", "b"}
    assert set(step(worker)) == {"a"}, "one block is free: the higher rank grows"
    report = worker.report()
    assert report.short_blocks == 1
    paused = {progress.request_id: progress.status for progress in report.progress}
    assert paused == {"a": SequenceStatus.RUNNING, "b": SequenceStatus.PAUSED}


def test_preemption_drops_kv_once_and_recompute_covers_the_output() -> None:
    worker = executor()
    worker.apply_plan(plan(1, slot("a", prompt=4, out=8)))
    step(worker)
    step(worker)
    worker.apply_plan(plan(2, slot("a", preemptions=1, payload=False)))
    assert worker.blocks.num_free == worker.blocks.num_blocks
    assert step(worker) == {"a": (0, 6, True)}
    worker.apply_plan(plan(3, slot("a", preemptions=1, payload=False)))
    assert step(worker) == {"a": (6, 1, True)}, "the same order again drops nothing"


def test_a_stalled_sequence_rests_keeps_its_kv_and_says_so() -> None:
    worker = executor()
    worker.apply_plan(plan(1, slot("a", out=8), slot("b", out=8)))
    step(worker)
    worker.stall(frozenset({"a"}))
    assert step(worker) == {"b": (4, 1, True)}
    progress = {each.request_id: each for each in worker.report().progress}
    assert (progress["a"].stalled, progress["a"].status, progress["a"].num_blocks) == (True, SequenceStatus.PAUSED, 1)
    assert not progress["b"].stalled
    worker.stall(frozenset())
    assert step(worker) == {"a": (4, 1, True), "b": (5, 1, True)}
    worker = executor(num_blocks=3)
    worker.apply_plan(plan(1, slot("long", prompt=12, out=1), slot("b", out=2)))
    worker.stall(frozenset({"long"}))
    assert set(step(worker)) == {"b"}, "others overtake who has not started"
    (waiting,) = [each.status for each in worker.report().progress if each.request_id == "long"]
    assert waiting is SequenceStatus.WAITING


def test_stalled_sequences_are_not_out_of_grants() -> None:
    worker = executor()
    worker.apply_plan(plan(1, slot("a", length_to=5), slot("b", out=8)))
    assert set(step(worker)) == {"a", "b"}
    worker.stall(frozenset({"b"}))
    assert step(worker) == {"a": (4, 1, True)}, "its grant is used up and there is no other: plain FCFS"
    worker = executor()
    worker.apply_plan(plan(1, slot("b", out=8)))
    step(worker)
    worker.stall(frozenset({"b"}))
    assert step(worker) == {}, "nothing is out of grants: it rests"


def test_a_stalled_sequence_is_no_reason_to_leave_the_order_of_the_plan() -> None:
    worker = executor(num_blocks=4)
    worker.apply_plan(plan(1, slot("a", prompt=8), slot("c")))
    worker.stall(frozenset({"c"}))
    step(worker)
    worker.apply_plan(plan(2, slot("a", payload=False), slot("big", prompt=12), slot("c", payload=False)))
    worker.stall(frozenset({"a"}))
    assert step(worker) == {}, "c came earlier, but ranks below big, which does not fit yet"


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
