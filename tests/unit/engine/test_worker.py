"""The worker's own duties: answers from broken steps, tokens that no lost reply can lose."""

from __future__ import annotations

import pytest

from farsight.core.errors import IntegrityError
from farsight.core.messages.plans import Plan, Slot
from farsight.core.messages.tokens import TokenDelta
from farsight.core.request import Request, SamplingParams
from farsight.engine.sequence import Sequence
from farsight.engine.worker import Worker
from farsight.kvcache.block_manager import hash_blocks, salted_root


def request(name: str, *, ingress: str = "", attempt: int = 0, out: int = 5) -> Request:
    return Request(name, attempt, ingress or f"for-{name}", (5, 6), SamplingParams(out, ignore_eos=True))


def slot(request: Request) -> Slot:
    return Slot(request.request_id, request.attempt, 99, 99, False, 0, request)


def plan(seq: int, *requests: str | Request, lease: int = 0) -> Plan:
    slots = [slot(request(each) if isinstance(each, str) else each) for each in requests]
    return Plan("w", lease, seq, 0, 0, tuple(slots))


def step(worker: Worker) -> list[TokenDelta]:
    batch = worker.begin_step()
    if batch is None:
        return []
    outputs = worker.finish_step(batch, worker.execute(batch))
    worker.check_integrity()
    return [output.delta for output in outputs]


def names(deltas: list[TokenDelta]) -> list[str]:
    return [delta.request_id for delta in deltas]


def test_deltas_are_addressed_to_the_ingress_of_their_request(worker: Worker) -> None:
    worker.offer_plan(plan(1, "a", "b"))
    batch = worker.begin_step()
    assert batch is not None
    outputs = worker.finish_step(batch, worker.execute(batch))
    assert [(output.ingress_id, output.delta.request_id) for output in outputs] == [("for-a", "a"), ("for-b", "b")]
    worker.check_integrity()


def test_the_newest_plan_wins_and_applies_at_the_step_boundary(worker: Worker) -> None:
    worker.offer_plan(plan(2, "b"))
    worker.offer_plan(plan(1, "a"))
    batch = worker.begin_step()
    assert batch is not None
    worker.offer_plan(plan(3))
    assert worker.executor.holds("b"), "not while the step runs"
    worker.finish_step(batch, worker.execute(batch))
    assert worker.begin_step() is None
    worker.check_integrity()
    assert worker.executor.blocks.num_free == worker.executor.blocks.num_blocks


def test_a_request_that_was_not_prepared_is_when_its_plan_applies(worker: Worker) -> None:
    """As when it was held while the plan was prepared, and gone when it applied."""
    worker.offer_plan(plan(1, "a"), prepared={})
    assert names(step(worker)) == ["a"]


def test_one_record_has_lengths_tokens_and_text_and_a_check_holds_them_together(worker: Worker) -> None:
    worker.offer_plan(plan(1, "a"))
    step(worker)
    record = worker.executor.sequences["a"]
    assert isinstance(record, Sequence)
    assert (record.num_tokens, record.output_len, record.computed_len) == (len(record.token_ids), 1, 2)
    record.token_ids.append(7)
    with pytest.raises(IntegrityError, match="a: 4 tokens are known, 3 are booked"):
        worker.check_integrity()


def test_a_take_over_returns_the_requests_in_the_order_of_their_progress(worker: Worker) -> None:
    requests = [request(name) for name in "cab"]
    worker.offer_plan(plan(1, *requests))
    step(worker)
    worker.offer_plan(plan(2, requests[2], requests[0], request("d"), requests[1]))
    step(worker)
    state = worker.take_over()
    assert [held.request_id for held in state.held] == ["b", "c", "d", "a"]
    assert [each.request_id for each in state.report.progress] == ["b", "c", "d", "a"]
    assert [each.output_len for each in state.report.progress] == [2, 2, 1, 2]
    assert state.held[1] == requests[0]
    assert (state.ready, state.lease, state.report.lease) == (worker.ready, 1, 1)


def test_a_pending_plan_of_the_lease_before_does_not_stand_in_the_way_of_the_first_new_one(worker: Worker) -> None:
    worker.offer_plan(plan(9, "a"))
    lease = worker.take_over().lease
    worker.offer_plan(plan(1, "b", lease=lease))
    assert names(step(worker)) == ["b"]


def test_a_plan_of_the_lease_before_does_not_push_out_one_of_the_lease_in_force(worker: Worker) -> None:
    lease = worker.take_over().lease
    worker.offer_plan(plan(1, "a", lease=lease))
    worker.offer_plan(plan(99, "b", lease=lease - 1))
    assert names(step(worker)) == ["a"]


def test_the_ingress_replicas_of_what_is_held_are_known(worker: Worker) -> None:
    assert worker.ingress_ids == set()
    worker.offer_plan(plan(1, request("a", ingress="i", out=1), request("b", ingress="i"), request("c", ingress="j")))
    step(worker)
    assert worker.ingress_ids == {"i", "j"}
    worker.abort_ingress("i")
    assert worker.ingress_ids == {"j"}


def test_who_does_not_take_tokens_rests_by_request_or_by_ingress(worker: Worker) -> None:
    worker.offer_plan(plan(1, *(request(name, ingress=name[0], out=99) for name in ("i1", "i2", "j1", "j2", "k1"))))
    step(worker)
    worker.stall({"i": None, "j": ["j2", "i1", "unknown"], "other": None})
    assert names(step(worker)) == ["j1", "k1"]
    progress = worker.take_over().report.progress
    assert [each.request_id for each in progress if each.stalled] == ["i1", "i2", "j2"]
    worker.stall({"i": [], "k": ["k1"]})
    assert names(step(worker)) == ["i1", "i2", "j1", "j2"]


def prefix_hits(worker: Worker, *requests: Request) -> list[int]:
    """Cached prompt tokens of each, run to its end before the next one comes."""
    found = []
    for seq, each in enumerate(requests, 1):
        worker.offer_plan(plan(seq, each))
        deltas = step(worker)
        found.append(deltas[0].cached_len)
        while step(worker):
            pass
    return found


def test_salts_and_the_hashes_that_requests_come_with_decide_what_is_shared(worker: Worker) -> None:
    prompt = tuple(range(5, 15))

    def asked(name: str, salt: str = "", hashes: tuple[int, ...] = ()) -> Request:
        params = SamplingParams(2, ignore_eos=True)
        return Request(name, 0, "i", prompt, params, prefix_hashes=hashes, cache_salt=salt)

    right, salted = tuple(hash_blocks(prompt, 4)), tuple(hash_blocks(prompt, 4, salted_root("x")))
    requests = [asked("a"), asked("b", "x"), asked("c", hashes=right), asked("d", "x", salted), asked("e", "x", right)]
    requests += [asked("f", hashes=right[:1]), asked("g", "y", (1, 2))]
    assert prefix_hits(worker, *requests) == [0, 0, 8, 8, 8, 8, 0], "hashes of another kind are not believed"
