"""What every executor makes of plans, however it composes its steps: the part of the lease protocol that is shared."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from farsight.core.request import SequenceStatus
from farsight.kvcache import (
    BatchLimits,
    BlockManager,
    LeaseExecutor,
    PipelinedExecutor,
    PlanExecutor,
    StaticExecutor,
    StepBatch,
)
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
    worker.apply_plan(plan(3, slot("unknown", payload=False)))
    assert step(worker) == {} and worker.report().progress == (), "nothing is known of it"


def test_a_finished_sequence_is_not_started_again_by_a_plan_that_did_not_know(make: MakeExecutor) -> None:
    worker = make()
    worker.apply_plan(plan(1, slot("a", out=1)))
    step(worker)
    assert worker.report().report_seq == 1
    worker.apply_plan(plan(2, slot("a", out=1), as_of=0))
    assert step(worker) == {}
    lease = worker.take_over()
    report = worker.report()
    assert [end.request_id for end in report.finished] == ["a"], "also after a take-over"
    worker.apply_plan(plan(1, slot("a", out=1), lease=lease, as_of=0))
    assert step(worker) == {}
    worker.apply_plan(plan(2, slot("b"), lease=lease, as_of=report.report_seq))
    assert set(step(worker)) == {"b"}


def test_a_newer_attempt_replaces_an_older_one_and_never_the_reverse(make: MakeExecutor) -> None:
    worker = make()
    worker.apply_plan(plan(1, slot("a", prompt=4, attempt=1)))
    step(worker)
    assert worker.apply_plan(plan(2, slot("a", prompt=4, attempt=0))) == []
    assert step(worker) == {"a": (4, 1, True)}
    assert worker.apply_plan(plan(3, slot("a", prompt=7, attempt=2))) == ["a"]
    assert step(worker) == {"a": (0, 7, True)}
    assert worker.apply_plan(plan(4, slot("a", prompt=4, out=9, attempt=3, resumed=2))) == ["a"]
    assert step(worker) == {"a": (0, 6, True)}


def test_a_stopped_or_failed_sequence_frees_its_blocks_at_once(make: MakeExecutor) -> None:
    worker = make()
    worker.apply_plan(plan(1, slot("a", out=50)))
    step(worker, stopped=("a",))
    assert worker.blocks.num_free == worker.blocks.num_blocks
    assert worker.report().finished[0].status is SequenceStatus.FINISHED_STOPPED
    worker.apply_plan(plan(2, slot("b")))
    assert worker.next_batch() is not None
    assert worker.end("b", SequenceStatus.FINISHED_FAILED).status is SequenceStatus.FINISHED_FAILED
    assert worker.blocks.num_free == worker.blocks.num_blocks
    worker.check_integrity()


def test_a_take_over_keeps_what_is_held_and_restarts_plan_numbering_under_a_higher_lease(make: MakeExecutor) -> None:
    worker = make()
    worker.apply_plan(plan(7, slot("a", out=8), slot("b", out=8)))
    step(worker)
    before = worker.report()
    lease = worker.take_over()
    after = worker.report()
    assert (after.lease, after.plan_seq, after.progress) == (lease, 0, before.progress)
    assert after.report_seq == before.report_seq + 1, "reports are numbered on"
    assert step(worker) == {"a": (4, 1, True), "b": (4, 1, True)}, "no step waits for a plan"
    worker.apply_plan(plan(1, slot("b", payload=False), lease=lease))
    assert (worker.report().plan_seq, set(step(worker))) == (1, {"b"})
    assert worker.take_over() == lease + 1 == 2


@pytest.mark.parametrize("lease", [0, 1, 3], ids=["never taken over", "the one before", "not granted yet"])
def test_plans_of_another_lease_are_dropped_however_new_they_are(make: MakeExecutor, lease: int) -> None:
    worker = make()
    worker.apply_plan(plan(1, slot("a")))
    worker.take_over()
    worker.take_over()
    assert worker.apply_plan(plan(99, slot("b"), lease=lease)) == []
    assert set(step(worker)) == {"a"}
    assert worker.report().plan_seq == 0


def test_a_resumed_request_starts_with_its_known_tokens_and_ends_at_the_same_length(make: MakeExecutor) -> None:
    worker = make()
    worker.apply_plan(plan(1, slot("a", prompt=4, out=5, attempt=1, resumed=3)))
    assert worker.report().progress[0].output_len == 3
    assert step(worker) == {"a": (0, 7, True)}
    assert step(worker) == {"a": (7, 1, True)}
    assert [(end.attempt, end.output_len) for end in worker.report().finished] == [(1, 5)]


LIMITS = BatchLimits(8, 64)

EXECUTORS: dict[str, Callable[[], PlanExecutor]] = {
    "lease": lambda: LeaseExecutor(BlockManager(16, 4), LIMITS, "w"),
    "pipelined": lambda: PipelinedExecutor(BlockManager(16, 4), LIMITS, "w", max_in_flight=2),
    "static": lambda: StaticExecutor(BlockManager(16, 4), LIMITS, "w", 64),
}


@pytest.fixture(params=EXECUTORS)
def worker(request: pytest.FixtureRequest) -> PlanExecutor:
    return EXECUTORS[request.param]()


def begin(worker: PlanExecutor) -> StepBatch:
    batch = worker.next_batch()
    worker.check_integrity()
    assert batch is not None
    return batch


@pytest.mark.parametrize("num_before", [0, 2])
def test_it_ends_alone(worker: PlanExecutor, num_before: int) -> None:
    given = plan(1, slot("a", 6, 5), slot("bad", 3, 5), slot("c", 2, 5))
    worker.apply_plan(given)
    for _ in range(num_before):
        for batch in [begin(worker)] if worker.max_in_flight == 1 else [begin(worker), *_next(worker)]:
            worker.commit(batch)
    batches = [begin(worker), *_next(worker)]
    ended = [end for batch in batches for end in worker.commit(batch, failed=["bad"] if _holds(batch) else [])]
    worker.check_integrity()
    assert [(end.request_id, end.status, end.output_len) for end in ended] == [
        ("bad", SequenceStatus.FINISHED_FAILED, num_before)
    ]
    assert worker.blocks.table("bad") == [] and not worker.holds("bad")
    worker.apply_plan(plan(2, slot("a", 6, 5), slot("bad", 3, 5, preemptions=1), slot("c", 2, 5)))
    ran = [step(worker) for _ in range(40)]
    assert not any("bad" in each for each in ran), "a plan that has not heard of the end starts nothing again"
    ends = {end.request_id: (end.status, end.output_len) for end in worker.report().finished}
    assert ends.pop("bad") == (SequenceStatus.FINISHED_FAILED, num_before)
    assert ends == dict.fromkeys("ac", (SequenceStatus.FINISHED_LENGTH, 5))
    assert worker.blocks.num_free == worker.blocks.num_blocks


def _next(worker: PlanExecutor) -> list[StepBatch]:
    """The other steps that may be under way."""
    more = [worker.next_batch() for _ in range(worker.max_in_flight - 1)]
    return [batch for batch in more if batch is not None]


def _holds(batch: StepBatch) -> bool:
    return any(item.request_id == "bad" for item in batch.items)


def test_what_its_last_step_computed_is_not_found_by_others() -> None:
    worker = LeaseExecutor(BlockManager(16, 4), LIMITS, "w")
    worker.share_prefixes(lambda request_id, num_blocks: list(range(1, num_blocks + 1)))
    worker.apply_plan(plan(1, slot("bad", 12)))
    worker.commit(begin(worker), failed=["bad"])
    worker.apply_plan(plan(2, slot("next", 12), as_of=1))
    assert step(worker) == {"next": (0, 12, True)}, "from the beginning"


def test_all_of_a_static_batch_may_fail() -> None:
    worker = EXECUTORS["static"]()
    worker.apply_plan(plan(1, slot("a"), slot("b")))
    ended = worker.commit(begin(worker), failed=["a", "b"])
    assert [end.status for end in ended] == [SequenceStatus.FINISHED_FAILED] * 2
    assert worker.next_batch() is None
    worker.apply_plan(plan(2, slot("c", out=1)))
    assert step(worker) == {"c": (0, 4, True)}
