"""The replica scheduler and the host: who is sent there and called back, by itself or by the manager's orders."""

from __future__ import annotations

import dataclasses

import pytest

from farsight.core.codec import decode, encode
from farsight.core.errors import MessageError
from farsight.core.messages.kv import OffloadOrders, OffloadQuestion, QueueSize
from farsight.core.messages.plans import SlotProgress
from farsight.core.request import Residency, SequenceStatus
from farsight.policies.compose import build_offload
from farsight.policies.order.offload_orders import OffloadDecider
from farsight.policies.replica.events import (
    AskOffload,
    Event,
    Instruction,
    OffloadOrdered,
    OffloadUnanswered,
    RequestsAborted,
)
from tests.unit.policies.replica.scheduler_harness import READY, Harness, request, state

DEVICE, HOST = Residency.DEVICE, Residency.HOST


class Pool(Harness):
    """A scheduler under which ``a`` and ``b`` run with 5 of 10 blocks each; keeps the questions that it asks."""

    tick_s = 0.0

    def __init__(self, num_host_blocks: int = 10, offload_deadline_s: float = 0.0) -> None:
        self.asked: list[OffloadQuestion] = []
        self.seq = 0
        worker = state(ready=dataclasses.replace(READY, num_host_blocks=num_host_blocks))
        super().__init__(worker=worker, kv="swap-newest", offload_deadline_s=offload_deadline_s)
        self.arrive(request("a", 20, 20), request("b", 20, 20))
        self.hear(on_device("a"), on_device("b"))

    def handle(self, event: Event) -> list[Instruction]:
        said = super().handle(event)
        self.asked += [each.question for each in said if isinstance(each, AskOffload)]
        return said

    def hear(self, *progress: SlotProgress, short: int = 0) -> None:
        self.seq += 1
        self.report(self.seq, *progress, short=short)

    def slot(self, name: str) -> tuple[bool, int, Residency, int]:
        """Whether it is admitted, how often its KV was dropped, where it is to be, how often it was moved."""
        (slot,) = [slot for slot in self.plans[-1].slots if slot.request_id == name]
        return not slot.standby, slot.num_preemptions, slot.residency, slot.num_moves

    def answer(self, **orders: object) -> None:
        self.handle(OffloadOrdered(OffloadOrders(self.asked[-1].seq, **orders)))  # type: ignore[arg-type]

    def tell(self, event: Event, at: float) -> None:
        self.now = at
        self.handle(event)

    @property
    def tally(self) -> tuple[int, int, int, int]:
        """Decided by the manager and alone, late, refused."""
        answered, alone, late, refused = dataclasses.astuple(self.scheduler.offload_tally)
        return answered, alone, late, refused


def on_device(name: str, num_blocks: int = 5) -> SlotProgress:
    known_len = 4 * num_blocks
    return SlotProgress(name, 0, SequenceStatus.RUNNING, 0, known_len, known_len - 20, num_blocks, False)


def leaving(name: str) -> SlotProgress:
    return dataclasses.replace(on_device(name), residency=HOST, num_moves=1, num_host_blocks=5)


def on_host(name: str) -> SlotProgress:
    return dataclasses.replace(leaving(name), status=SequenceStatus.OFFLOADED, num_blocks=0)


def test_a_victim_is_moved_and_called_back_when_there_is_room() -> None:
    h = Pool()
    h.hear(on_device("a"), on_device("b"), short=1)
    assert h.slot("b") == (False, 0, HOST, 1)
    h.hear(on_device("a"), leaving("b"), short=1)
    assert (h.slot("a")[0], h.slot("b")) == (True, (False, 0, HOST, 1)), "the blocks are on their way: no more victims"
    h.hear(on_device("a", 6), on_host("b"))
    assert h.slot("b") == (False, 0, HOST, 1), "there is no room yet"
    h.hear(on_device("a", 5), on_host("b"))
    assert h.slot("b") == (True, 0, DEVICE, 2)


def test_a_victim_that_the_host_has_no_room_for_is_computed_again() -> None:
    h = Pool()
    h.hear(on_device("a", 6), on_device("b"), short=1)
    h.hear(on_device("a", 6), dataclasses.replace(on_device("b"), num_moves=1))
    assert h.slot("b") == (False, 1, DEVICE, 1)


def test_without_a_host_pool_victims_are_computed_again() -> None:
    h = Pool(num_host_blocks=0)
    h.hear(on_device("a", 6), on_device("b"), short=1)
    assert h.slot("b") == (False, 1, DEVICE, 0)


DEADLINE_S = 0.02


def decider() -> OffloadDecider:
    found = build_offload("fcfs", 8, kv="swap-newest")
    assert found is not None
    return found


def pressed(*progress: SlotProgress) -> Pool:
    """``a`` and ``b`` fill the pool, and ``a`` lacks a block."""
    h = Pool(offload_deadline_s=DEADLINE_S)
    h.hear(*(progress or (on_device("a"), on_device("b"))), short=1)
    return h


def test_the_managers_answer_rides_in_the_next_plan() -> None:
    h = pressed()
    assert h.slot("b") == (True, 0, DEVICE, 0), "nothing moves before the answer"
    (question,) = h.asked
    assert [each.request_id for each in question.running] == ["a", "b"]
    orders = decider().decide(decode(encode(question), OffloadQuestion))
    assert orders == OffloadOrders(question.seq, offload=("b",))
    h.handle(OffloadOrdered(orders))
    assert h.slot("b") == (False, 0, HOST, 1)
    assert h.tally == (1, 0, 0, 0)


def test_without_pressure_nothing_is_asked() -> None:
    h = Pool(offload_deadline_s=DEADLINE_S)
    h.hear(on_device("a", 4), on_device("b", 4))
    assert not h.asked


def test_an_order_about_who_is_gone_or_is_first_or_unknown_is_refused() -> None:
    h = pressed()
    h.handle(RequestsAborted((("b", 0),)))
    h.answer(offload=("b", "a", "c", "b"), drop=("c",), upload=("a", "c"))
    assert h.slot("a") == (True, 0, DEVICE, 0)
    assert h.tally == (1, 0, 0, 7)


def test_an_order_that_is_needed_no_more_is_refused() -> None:
    h = pressed()
    h.hear(on_device("a", 3), on_device("b", 2))
    h.answer(offload=("b",))
    assert h.slot("b") == (True, 0, DEVICE, 0)
    assert h.tally == (1, 0, 0, 1)


def test_an_answer_to_another_question_is_ignored() -> None:
    h = pressed()
    h.handle(OffloadOrdered(OffloadOrders(h.asked[-1].seq - 1, offload=("b",))))
    assert h.slot("b") == (True, 0, DEVICE, 0)
    h.answer(offload=("b",))
    h.answer(drop=("a",))
    assert (h.slot("a"), h.slot("b")) == ((True, 0, DEVICE, 0), (False, 0, HOST, 1)), "an answer counts once"


def test_the_scheduler_decides_alone_after_the_deadline_and_waits_again_after_an_answer_in_time() -> None:
    h = pressed()
    question = h.asked[-1]
    h.tell(OffloadUnanswered(question.seq), DEADLINE_S)
    assert h.slot("b") == (False, 0, HOST, 1)
    assert h.tally == (0, 1, 1, 0)
    h.tell(OffloadOrdered(OffloadOrders(question.seq, drop=("b",))), 3 * DEADLINE_S)
    assert h.slot("b") == (False, 0, HOST, 1), "an answer that comes too late moves nothing"
    h.hear(on_device("a", 10), on_host("b"), short=1)
    assert h.tally[2] == 1, "it is not waited for"


@pytest.mark.parametrize("lost", [True, False])
def test_a_manager_that_is_gone_is_asked_again(lost: bool) -> None:
    h = pressed()
    h.handle(OffloadUnanswered(h.asked[-1].seq, lost=lost))
    assert h.slot("b") == (False, 0, HOST, 1)
    assert len(h.asked) == 1 + lost, "a question that is still open is not put twice"


def test_the_scheduler_needs_no_word_that_time_has_passed() -> None:
    h = pressed()
    h.now = DEADLINE_S
    h.hear(on_device("a"), on_device("b"), short=1)
    assert h.slot("b") == (False, 0, HOST, 1)


def test_a_question_whose_levels_have_no_finite_quantum_is_refused() -> None:
    found = build_offload("fastserve", 8)
    assert found is not None
    question = OffloadQuestion(1, (), (), (), 0, 1, 0, 0, 4, quantum_s=0.01)
    bad = decode(encode(question), OffloadQuestion)
    assert found.decide(bad).offload == ()
    with pytest.raises(MessageError, match="level"):
        found.decide(dataclasses.replace(question, queues=(QueueSize(0, 10**9, 1),)))
