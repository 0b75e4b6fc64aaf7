"""Several steps under way at once: who is in which, and what becomes of a step whose sequences have gone."""

from __future__ import annotations

import dataclasses

import pytest

from farsight.core.messages.plans import Plan
from farsight.core.request import Residency, SequenceStatus
from farsight.kvcache import BatchLimits, BlockManager, PipelinedExecutor, StepBatch
from farsight.kvcache.block_manager import hash_blocks
from tests.unit.kvcache.plans import plan, slot


def make(num_stages: int = 2, *, num_blocks: int = 16, host_blocks: int = 0) -> PipelinedExecutor:
    host = BlockManager(host_blocks, 4) if host_blocks else None
    return PipelinedExecutor(BlockManager(num_blocks, 4), BatchLimits(8, 32), "w", host, max_in_flight=num_stages)


def begin(worker: PipelinedExecutor) -> StepBatch:
    batch = worker.next_batch()
    worker.check_integrity()
    assert batch is not None
    return batch


def names(batch: StepBatch) -> list[str]:
    return [item.request_id for item in batch.items]


def prefilled(worker: PipelinedExecutor, *names: str, out: int = 9) -> Plan:
    """Applies a plan of these sequences and computes their prompts."""
    given = plan(1, *(slot(name, out=out) for name in names))
    worker.apply_plan(given)
    worker.commit(begin(worker))
    return given


def test_the_running_sequences_are_dealt_out_to_the_stages() -> None:
    worker = make(2)
    prefilled(worker, *"abcde")
    first, second = begin(worker), begin(worker)
    assert (names(first), names(second)) == (["a", "b", "c"], ["d", "e"])
    assert worker.next_batch() is None, "all are in a step"
    worker.commit(first)
    assert names(begin(worker)) == ["a", "b", "c"]
    worker = make(2)
    prefilled(worker, *"abcd")
    first, second = begin(worker), begin(worker)
    worker.commit(first, stopped=["a"])
    assert names(begin(worker)) == ["b"], "an end makes the batches even again"
    worker.commit(second, stopped=["c"])
    assert names(begin(worker)) == ["d"]
    worker = make(2)
    given = prefilled(worker, "a")
    begin(worker)
    worker.apply_plan(dataclasses.replace(given, plan_seq=2, slots=(*given.slots, slot("b"))))
    assert names(begin(worker)) == ["b"], "a new prompt goes into the next step, whatever is under way"


def test_statuses_show_who_is_in_a_step() -> None:
    worker = make(3)
    prefilled(worker, *"abc")
    batches = [begin(worker) for _ in range(3)]
    assert {each.status for each in worker.report().progress} == {SequenceStatus.RUNNING}
    worker.commit(batches[0])
    worker.stall(frozenset("a"))
    assert worker.next_batch() is None
    statuses = {each.request_id: each.status for each in worker.report().progress}
    running = SequenceStatus.RUNNING
    assert statuses == {"a": SequenceStatus.PAUSED, "b": running, "c": running}


@pytest.mark.parametrize("again", [False, True])
def test_what_is_dropped_under_way_does_not_count_when_its_step_is_over(again: bool) -> None:
    worker = make(2)
    given = prefilled(worker, "a", "b")
    under_way, other = begin(worker), begin(worker)
    assert names(under_way) == ["a"]
    slots = (dataclasses.replace(given.slots[0], num_preemptions=1), given.slots[1]) if again else given.slots[1:]
    worker.apply_plan(dataclasses.replace(given, plan_seq=2, slots=slots))
    worker.check_integrity()
    assert not worker.counts(under_way, "a")
    if again:  # it may start again beside the step that it was thrown out of
        fresh = begin(worker)
        assert [(item.request_id, item.start, item.num_tokens) for item in fresh.items] == [("a", 0, 5)]
    assert worker.commit(under_way) == []
    worker.commit(other)
    worker.check_integrity()
    progress = {each.request_id: each.output_len for each in worker.report().progress}
    assert progress == ({"a": 1, "b": 2} if again else {"b": 2})
    if again:
        worker.commit(fresh)
        assert {each.request_id: each.output_len for each in worker.report().progress} == {"a": 2, "b": 2}


def test_an_offload_waits_for_the_step_that_its_sequence_is_in() -> None:
    worker = make(2, host_blocks=8)
    given = prefilled(worker, "a", "b")
    under_way = begin(worker)
    moved = dataclasses.replace(given.slots[0], residency=Residency.HOST, num_moves=1)
    worker.apply_plan(dataclasses.replace(given, plan_seq=2, slots=(moved, given.slots[1])))
    begin(worker)
    assert worker.take_copies() == []
    worker.commit(under_way)
    assert worker.next_batch() is None
    (copy,) = worker.take_copies()
    assert (copy.to, len(copy.source)) == (Residency.HOST, 2)
    worker.complete_copy(copy.copy_id)
    worker.check_integrity()


def test_grants_that_are_used_up_by_some_do_not_let_them_run_beside_the_others() -> None:
    """Plain FCFS is for when no sequence may go on by the plan; here one does, in another step."""
    worker = make(2)
    worker.apply_plan(plan(1, slot("a", out=9, length_to=5), slot("b", out=9)))
    worker.commit(begin(worker))
    assert names(begin(worker)) == ["b"]
    assert worker.next_batch() is None


def test_a_prefix_that_another_step_computes_is_waited_for() -> None:
    worker = make(2)
    worker.share_prefixes(lambda name, count: hash_blocks([1] * 16, 4)[:count])
    worker.apply_plan(plan(1, slot("a", prompt=10)))
    under_way = begin(worker)
    worker.apply_plan(plan(2, slot("a", prompt=10), slot("b", prompt=10)))
    assert worker.next_batch() is None, "b would compute the blocks of a once more"
    worker.commit(under_way)
    assert {(item.request_id, item.start, item.num_tokens) for item in begin(worker).items} == {
        ("a", 10, 1),
        ("b", 8, 2),
    }
