"""What a worker does inside a plan, one rule a test."""

from __future__ import annotations

import pytest

from core.request import SequenceStatus
from kvcache import BatchLimits, BlockManager, LeaseExecutor
from tests.unit.kvcache.plans import plan, slot, step

BLOCK = 4


def executor(num_blocks: int = 16, max_num_seqs: int = 8, max_batch_tokens: int = 64) -> LeaseExecutor:
    return LeaseExecutor(BlockManager(num_blocks, BLOCK), BatchLimits(max_num_seqs, max_batch_tokens), "w")


def test_long_prompts_are_prefilled_in_several_steps_beside_decodes() -> None:
    worker = executor(max_batch_tokens=6)
    worker.apply_plan(plan(1, slot("a", prompt=4), slot("b", prompt=9)))
    assert step(worker) == {"a": (0, 4, True), "b": (0, 2, False)}
    assert step(worker) == {"a": (4, 1, True), "b": (2, 5, False)}
    assert step(worker) == {"a": (5, 1, True), "b": (7, 2, True)}


def test_a_step_holds_at_most_max_num_seqs() -> None:
    worker = executor(max_num_seqs=2)
    worker.apply_plan(plan(1, slot("a"), slot("b"), slot("c")))
    assert set(step(worker)) == {"a", "b"}


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


def test_a_standby_starts_only_in_the_place_of_an_ended_slot() -> None:
    worker = executor()
    worker.apply_plan(plan(1, slot("a", out=1), slot("b", out=9), slot("s", standby=True), slot("t", standby=True)))
    assert set(step(worker)) == {"a", "b"}
    assert set(step(worker)) == {"b", "s"}
    assert set(step(worker, stopped=("s",))) == {"b", "s"}
    assert set(step(worker)) == {"b", "t"}, "the standby's own end leaves one place, not two"


def test_a_standby_credit_survives_a_plan_that_did_not_know_of_the_end() -> None:
    worker = executor()
    worker.apply_plan(plan(1, slot("a", out=1), slot("s", standby=True), slot("t", standby=True)))
    step(worker)
    worker.apply_plan(plan(2, slot("a", out=1), slot("s", standby=True), slot("t", standby=True), as_of=0))
    assert set(step(worker)) == {"s"}


def test_a_start_respects_the_reserve_but_growth_does_not() -> None:
    worker = executor(num_blocks=4)
    worker.apply_plan(plan(1, slot("a", prompt=8, out=8), slot("b", prompt=4), reserve=2))
    assert set(step(worker)) == {"a"}, "2 free blocks are the reserve"
    assert set(step(worker)) == {"a"}
    assert worker.blocks.num_free == 1


def test_nothing_of_lower_rank_overtakes_a_start_that_does_not_fit() -> None:
    worker = executor(num_blocks=4)
    worker.apply_plan(plan(1, slot("a", prompt=8), slot("big", prompt=12), slot("small", prompt=4)))
    assert set(step(worker)) == {"a"}


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


@pytest.mark.parametrize("max_batch_tokens", [1, 3, 64])
def test_num_tokens_of_a_batch_never_exceeds_the_limit(max_batch_tokens: int) -> None:
    worker = executor(max_batch_tokens=max_batch_tokens)
    worker.apply_plan(plan(1, slot("a", prompt=9), slot("b", prompt=5)))
    while (batch := worker.next_batch()) is not None:
        assert batch.num_tokens <= max_batch_tokens
        worker.commit(batch)
    assert worker.num_held == 0


def statuses(worker: LeaseExecutor) -> dict[str, SequenceStatus]:
    return {progress.request_id: progress.status for progress in worker.report().progress}


def test_a_stalled_sequence_rests_keeps_its_kv_and_says_so() -> None:
    worker = executor()
    worker.apply_plan(plan(1, slot("a", out=8), slot("b", out=8)))
    step(worker)
    worker.stall(frozenset({"a"}))
    assert step(worker) == {"b": (4, 1, True)}
    progress = {each.request_id: each for each in worker.report().progress}
    assert (progress["a"].stalled, progress["a"].status, progress["a"].num_blocks) == (True, SequenceStatus.PAUSED, 1)
    assert not progress["b"].stalled


def test_a_sequence_no_longer_stalled_goes_on_where_it_rested() -> None:
    worker = executor()
    worker.apply_plan(plan(1, slot("a", out=8)))
    step(worker)
    worker.stall(frozenset({"a"}))
    assert step(worker) == {}
    worker.stall(frozenset())
    assert step(worker) == {"a": (4, 1, True)}


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


def test_plain_fcfs_does_not_wake_a_stalled_sequence() -> None:
    worker = executor()
    worker.apply_plan(plan(1, slot("a", length_to=5), slot("b", length_to=5)))
    step(worker)
    worker.stall(frozenset({"a"}))
    assert step(worker) == {"b": (4, 1, True)}


def test_others_overtake_a_stalled_sequence_that_has_not_started() -> None:
    worker = executor(num_blocks=3)
    worker.apply_plan(plan(1, slot("long", prompt=12, out=1), slot("b", out=2)))
    worker.stall(frozenset({"long"}))
    assert set(step(worker)) == {"b"}
    assert statuses(worker)["long"] is SequenceStatus.WAITING


def test_a_stalled_standby_leaves_its_place_to_the_next() -> None:
    worker = executor()
    worker.apply_plan(plan(1, slot("a", out=1), slot("s", standby=True), slot("t", standby=True)))
    worker.stall(frozenset({"s"}))
    step(worker)
    assert set(step(worker)) == {"t"}


def test_a_resumed_request_needs_blocks_for_its_output_to_start() -> None:
    worker = executor(num_blocks=4)
    worker.apply_plan(plan(1, slot("a", prompt=8, out=1), slot("b", prompt=4, out=9, resumed=8)))
    assert set(step(worker)) == {"a"}, "b needs 3 blocks at once"
    assert step(worker) == {"b": (0, 12, True)}
