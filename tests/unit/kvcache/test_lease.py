"""What a worker does inside a plan, one rule a test."""

from __future__ import annotations

import pytest

from core.messages import Plan, Slot, StepSample
from core.request import Request, SamplingParams, SequenceStatus
from kvcache import BatchLimits, BlockManager, LeaseExecutor, StepBatch

BLOCK = 4


def executor(num_blocks: int = 16, max_num_seqs: int = 8, max_batch_tokens: int = 64) -> LeaseExecutor:
    return LeaseExecutor(BlockManager(num_blocks, BLOCK), BatchLimits(max_num_seqs, max_batch_tokens), "w")


def slot(
    name: str,
    prompt: int = 4,
    out: int = 4,
    *,
    prefill_to: int = 1000,
    length_to: int = 1000,
    standby: bool = False,
    preemptions: int = 0,
    payload: bool = True,
    attempt: int = 0,
    resumed: int = 0,
) -> Slot:
    request = Request(name, attempt, "i", (1,) * prompt, SamplingParams(out), (2,) * resumed) if payload else None
    return Slot(name, attempt, prefill_to, length_to, standby, preemptions, request)


def plan(seq: int, *slots: Slot, as_of: int = 0, reserve: int = 0, incarnation: str = "w", lease: int = 0) -> Plan:
    return Plan(incarnation, lease, seq, as_of, reserve, slots)


def step(worker: LeaseExecutor, stopped: tuple[str, ...] = ()) -> dict[str, tuple[int, int, bool]]:
    """Runs one step; returns {id: (start, tokens, samples)}."""
    batch = worker.next_batch()
    worker.check_integrity()
    if batch is None:
        return {}
    worker.commit(batch, stopped)
    worker.check_integrity()
    return {item.request_id: (item.start, item.num_tokens, item.samples) for item in batch.items}


def test_prefill_then_decode_to_the_length_limit() -> None:
    worker = executor()
    worker.apply_plan(plan(1, slot("a", prompt=5, out=3)))
    assert step(worker) == {"a": (0, 5, True)}
    assert step(worker) == {"a": (5, 1, True)}
    assert step(worker) == {"a": (6, 1, True)}
    assert step(worker) == {}
    report = worker.report()
    assert [(end.request_id, end.status, end.output_len) for end in report.finished] == [
        ("a", SequenceStatus.FINISHED_LENGTH, 3)
    ]
    assert report.free_blocks == worker.blocks.num_blocks


def test_a_stopped_sequence_frees_its_blocks_at_once() -> None:
    worker = executor()
    worker.apply_plan(plan(1, slot("a", out=50)))
    step(worker, stopped=("a",))
    assert worker.blocks.num_free == worker.blocks.num_blocks
    assert worker.report().finished[0].status is SequenceStatus.FINISHED_STOPPED


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


def test_old_duplicate_and_foreign_plans_are_dropped() -> None:
    worker = executor()
    worker.apply_plan(plan(2, slot("a")))
    worker.apply_plan(plan(1, slot("b")))
    worker.apply_plan(plan(2, slot("c")))
    worker.apply_plan(plan(3, slot("d"), incarnation="another"))
    assert set(step(worker)) == {"a"}


def test_a_sequence_missing_from_a_plan_is_forgotten_and_its_kv_freed() -> None:
    worker = executor()
    worker.apply_plan(plan(1, slot("a"), slot("b")))
    step(worker)
    assert worker.apply_plan(plan(2, slot("b", payload=False))) == ["a"]
    assert set(step(worker)) == {"b"}


def test_a_finished_sequence_is_not_started_again_by_a_plan_that_did_not_know() -> None:
    worker = executor()
    worker.apply_plan(plan(1, slot("a", out=1)))
    step(worker)
    assert worker.report().report_seq == 1
    worker.apply_plan(plan(2, slot("a", out=1), as_of=0))
    assert step(worker) == {}
    worker.apply_plan(plan(3, slot("b"), as_of=1))
    assert set(step(worker)) == {"b"}


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


def test_a_newer_attempt_replaces_an_older_one_and_never_the_reverse() -> None:
    worker = executor()
    worker.apply_plan(plan(1, slot("a", prompt=4, attempt=1)))
    step(worker)
    assert worker.apply_plan(plan(2, slot("a", prompt=4, attempt=0))) == []
    assert step(worker) == {"a": (4, 1, True)}
    assert worker.apply_plan(plan(3, slot("a", prompt=7, attempt=2))) == ["a"]
    assert step(worker) == {"a": (0, 7, True)}


def test_a_slot_without_payload_of_an_unknown_sequence_is_left_out() -> None:
    worker = executor()
    worker.apply_plan(plan(1, slot("a", payload=False)))
    assert step(worker) == {}
    assert worker.report().progress == ()


def test_a_failed_sequence_ends_and_frees() -> None:
    worker = executor()
    worker.apply_plan(plan(1, slot("a")))
    batch = worker.next_batch()
    assert isinstance(batch, StepBatch)
    assert worker.end("a", SequenceStatus.FINISHED_FAILED).status is SequenceStatus.FINISHED_FAILED
    assert worker.blocks.num_free == worker.blocks.num_blocks
    worker.check_integrity()


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


def test_a_take_over_keeps_what_is_held_and_goes_on_with_it() -> None:
    worker = executor()
    worker.apply_plan(plan(1, slot("a", out=8), slot("b", out=8)))
    step(worker)
    before = worker.report()
    assert worker.take_over() == 1
    after = worker.report()
    assert after.progress == before.progress
    assert after.report_seq == before.report_seq + 1, "reports are numbered on"
    assert step(worker) == {"a": (4, 1, True), "b": (4, 1, True)}, "no step waits for a plan"


def test_a_take_over_restarts_plan_numbering_under_a_higher_lease() -> None:
    worker = executor()
    worker.apply_plan(plan(7, slot("a")))
    lease = worker.take_over()
    report = worker.report()
    assert (report.lease, report.plan_seq) == (lease, 0)
    worker.apply_plan(plan(1, slot("b"), lease=lease))
    assert (worker.report().plan_seq, set(step(worker))) == (1, {"b"})
    assert worker.take_over() == lease + 1


@pytest.mark.parametrize("lease", [0, 1, 3], ids=["never taken over", "the one before", "not granted yet"])
def test_plans_of_another_lease_are_dropped_however_new_they_are(lease: int) -> None:
    worker = executor()
    worker.apply_plan(plan(1, slot("a")))
    worker.take_over()
    worker.take_over()
    assert worker.apply_plan(plan(99, slot("b"), lease=lease)) == []
    assert set(step(worker)) == {"a"}
    assert worker.report().plan_seq == 0


def test_an_end_before_a_take_over_is_reported_after_it_and_not_started_again() -> None:
    worker = executor()
    worker.apply_plan(plan(1, slot("a", out=1)))
    step(worker)
    lease = worker.take_over()
    report = worker.report()
    assert [end.request_id for end in report.finished] == ["a"]
    worker.apply_plan(plan(1, slot("a", out=1), lease=lease, as_of=report.report_seq - 1))
    assert step(worker) == {}


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


def test_a_resumed_request_starts_with_its_known_tokens_and_ends_at_the_same_length() -> None:
    worker = executor()
    worker.apply_plan(plan(1, slot("a", prompt=4, out=5, attempt=1, resumed=3)))
    assert worker.report().progress[0].output_len == 3
    assert step(worker) == {"a": (0, 7, True)}
    assert step(worker) == {"a": (7, 1, True)}
    assert [(end.attempt, end.output_len) for end in worker.report().finished] == [(1, 5)]


def test_a_resumed_request_needs_blocks_for_its_output_to_start() -> None:
    worker = executor(num_blocks=4)
    worker.apply_plan(plan(1, slot("a", prompt=8, out=1), slot("b", prompt=4, out=9, resumed=8)))
    assert set(step(worker)) == {"a"}, "b needs 3 blocks at once"
    assert step(worker) == {"b": (0, 12, True)}


def test_a_resumed_attempt_replaces_the_one_before() -> None:
    worker = executor()
    worker.apply_plan(plan(1, slot("a", prompt=4, out=9)))
    step(worker)
    assert worker.apply_plan(plan(2, slot("a", prompt=4, out=9, attempt=1, resumed=2))) == ["a"]
    assert step(worker) == {"a": (0, 6, True)}


def test_steps_are_passed_on_in_a_report() -> None:
    sample = StepSample(4, 0, 10, 0.5)
    assert executor().report((sample,)).steps == (sample,)
