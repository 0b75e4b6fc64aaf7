"""What every executor makes of plans, however it composes its steps: the part of the lease protocol that is shared."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from core.messages.step_times import StepSample
from core.request import SequenceStatus
from kvcache import BatchLimits, BlockManager, LeaseExecutor, PlanExecutor, StaticExecutor
from tests.unit.kvcache.plans import plan, slot, step

MakeExecutor = Callable[[], PlanExecutor]


@pytest.fixture(params=["ragged", "static"])
def make(request: pytest.FixtureRequest) -> MakeExecutor:
    """An executor of 16 blocks of 4 tokens, 8 sequences and 64 tokens a step."""
    blocks, limits = BlockManager(16, 4), BatchLimits(8, 64)
    if request.param == "ragged":
        return lambda: LeaseExecutor(blocks, limits, "w")
    return lambda: StaticExecutor(blocks, limits, "w", max_model_len=64)


def test_prefill_then_decode_to_the_length_limit(make: MakeExecutor) -> None:
    worker = make()
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


def test_a_stopped_sequence_frees_its_blocks_at_once(make: MakeExecutor) -> None:
    worker = make()
    worker.apply_plan(plan(1, slot("a", out=50)))
    step(worker, stopped=("a",))
    assert worker.blocks.num_free == worker.blocks.num_blocks
    assert worker.report().finished[0].status is SequenceStatus.FINISHED_STOPPED


def test_old_duplicate_and_foreign_plans_are_dropped(make: MakeExecutor) -> None:
    worker = make()
    worker.apply_plan(plan(2, slot("a")))
    worker.apply_plan(plan(1, slot("b")))
    worker.apply_plan(plan(2, slot("c")))
    worker.apply_plan(plan(3, slot("d"), incarnation="another"))
    assert set(step(worker)) == {"a"}


def test_a_sequence_missing_from_a_plan_is_forgotten_and_its_kv_freed(make: MakeExecutor) -> None:
    worker = make()
    worker.apply_plan(plan(1, slot("a"), slot("b")))
    step(worker)
    assert worker.apply_plan(plan(2, slot("b", payload=False))) == ["a"]
    assert set(step(worker)) == {"b"}


def test_a_finished_sequence_is_not_started_again_by_a_plan_that_did_not_know(make: MakeExecutor) -> None:
    worker = make()
    worker.apply_plan(plan(1, slot("a", out=1)))
    step(worker)
    assert worker.report().report_seq == 1
    worker.apply_plan(plan(2, slot("a", out=1), as_of=0))
    assert step(worker) == {}
    worker.apply_plan(plan(3, slot("b"), as_of=1))
    assert set(step(worker)) == {"b"}


def test_a_newer_attempt_replaces_an_older_one_and_never_the_reverse(make: MakeExecutor) -> None:
    worker = make()
    worker.apply_plan(plan(1, slot("a", prompt=4, attempt=1)))
    step(worker)
    assert worker.apply_plan(plan(2, slot("a", prompt=4, attempt=0))) == []
    assert step(worker) == {"a": (4, 1, True)}
    assert worker.apply_plan(plan(3, slot("a", prompt=7, attempt=2))) == ["a"]
    assert step(worker) == {"a": (0, 7, True)}


def test_a_slot_without_payload_of_an_unknown_sequence_is_left_out(make: MakeExecutor) -> None:
    worker = make()
    worker.apply_plan(plan(1, slot("a", payload=False)))
    assert step(worker) == {}
    assert worker.report().progress == ()


def test_a_failed_sequence_ends_and_frees(make: MakeExecutor) -> None:
    worker = make()
    worker.apply_plan(plan(1, slot("a")))
    batch = worker.next_batch()
    assert batch is not None
    assert worker.end("a", SequenceStatus.FINISHED_FAILED).status is SequenceStatus.FINISHED_FAILED
    assert worker.blocks.num_free == worker.blocks.num_blocks
    worker.check_integrity()


def test_a_take_over_keeps_what_is_held_and_goes_on_with_it(make: MakeExecutor) -> None:
    worker = make()
    worker.apply_plan(plan(1, slot("a", out=8), slot("b", out=8)))
    step(worker)
    before = worker.report()
    assert worker.take_over() == 1
    after = worker.report()
    assert after.progress == before.progress
    assert after.report_seq == before.report_seq + 1, "reports are numbered on"
    assert step(worker) == {"a": (4, 1, True), "b": (4, 1, True)}, "no step waits for a plan"


def test_a_take_over_restarts_plan_numbering_under_a_higher_lease(make: MakeExecutor) -> None:
    worker = make()
    worker.apply_plan(plan(7, slot("a")))
    lease = worker.take_over()
    report = worker.report()
    assert (report.lease, report.plan_seq) == (lease, 0)
    worker.apply_plan(plan(1, slot("b"), lease=lease))
    assert (worker.report().plan_seq, set(step(worker))) == (1, {"b"})
    assert worker.take_over() == lease + 1


@pytest.mark.parametrize("lease", [0, 1, 3], ids=["never taken over", "the one before", "not granted yet"])
def test_plans_of_another_lease_are_dropped_however_new_they_are(make: MakeExecutor, lease: int) -> None:
    worker = make()
    worker.apply_plan(plan(1, slot("a")))
    worker.take_over()
    worker.take_over()
    assert worker.apply_plan(plan(99, slot("b"), lease=lease)) == []
    assert set(step(worker)) == {"a"}
    assert worker.report().plan_seq == 0


def test_an_end_before_a_take_over_is_reported_after_it_and_not_started_again(make: MakeExecutor) -> None:
    worker = make()
    worker.apply_plan(plan(1, slot("a", out=1)))
    step(worker)
    lease = worker.take_over()
    report = worker.report()
    assert [end.request_id for end in report.finished] == ["a"]
    worker.apply_plan(plan(1, slot("a", out=1), lease=lease, as_of=report.report_seq - 1))
    assert step(worker) == {}


def test_a_resumed_request_starts_with_its_known_tokens_and_ends_at_the_same_length(make: MakeExecutor) -> None:
    worker = make()
    worker.apply_plan(plan(1, slot("a", prompt=4, out=5, attempt=1, resumed=3)))
    assert worker.report().progress[0].output_len == 3
    assert step(worker) == {"a": (0, 7, True)}
    assert step(worker) == {"a": (7, 1, True)}
    assert [(end.attempt, end.output_len) for end in worker.report().finished] == [(1, 5)]


def test_a_resumed_attempt_replaces_the_one_before(make: MakeExecutor) -> None:
    worker = make()
    worker.apply_plan(plan(1, slot("a", prompt=4, out=9)))
    step(worker)
    assert worker.apply_plan(plan(2, slot("a", prompt=4, out=9, attempt=1, resumed=2))) == ["a"]
    assert step(worker) == {"a": (0, 6, True)}


def test_steps_are_passed_on_in_a_report(make: MakeExecutor) -> None:
    sample = StepSample(4, 0, 10, 0.5)
    assert make().report((sample,)).steps == (sample,)
