"""A sequence of a step that got no token where it should have: it ends at once, and nothing of it is left to others."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from core.request import SequenceStatus
from kvcache import BatchLimits, BlockManager, LeaseExecutor, PipelinedExecutor, PlanExecutor, StaticExecutor, StepBatch
from tests.unit.kvcache.plans import plan, slot, step

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
