"""The KVOffloadManager's orders: asked for, checked, late, lost."""

from __future__ import annotations

import dataclasses

import pytest

from core.codec import decode, encode
from core.errors import MessageError
from core.messages.kv import OffloadOrders, OffloadQuestion, QueueSize
from core.messages.plans import SlotProgress
from policies.compose import build_offload
from policies.order.offload_orders import OffloadDecider
from policies.replica.events import AskOffload, Event, OffloadOrdered, OffloadUnanswered, RequestsAborted
from policies.replica.scheduler import SchedulerLimits
from tests.unit.policies.replica.test_offload import DEVICE, HOST, Harness, on_device, on_host

DEADLINE_S = 0.02


class Asking(Harness):
    """The same with a scheduler that asks; keeps the open question."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked: list[OffloadQuestion] = []
        super().__init__(limits=SchedulerLimits(8, 2, offload_deadline_s=DEADLINE_S))

    def take(self, instruction: object) -> None:
        super().take(instruction)
        if isinstance(instruction, AskOffload):
            self.asked.append(instruction.question)

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


def decider() -> OffloadDecider:
    found = build_offload("fcfs", 8, kv="swap-newest")
    assert found is not None
    return found


def pressed(*progress: SlotProgress) -> Asking:
    """``a`` and ``b`` fill the pool, and ``a`` lacks a block."""
    h = Asking()
    h.report(*(progress or (on_device("a"), on_device("b"))), short=1)
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
    h = Asking()
    h.report(on_device("a", 4), on_device("b", 4))
    assert not h.asked


def test_an_order_about_who_is_gone_or_is_first_or_unknown_is_refused() -> None:
    h = pressed()
    h.handle(RequestsAborted((("b", 0),)))
    h.answer(offload=("b", "a", "c", "b"), drop=("c",), upload=("a", "c"))
    assert h.slot("a") == (True, 0, DEVICE, 0)
    assert h.tally == (1, 0, 0, 7)


def test_an_order_that_is_needed_no_more_is_refused() -> None:
    h = pressed()
    h.report(on_device("a", 3), on_device("b", 2))
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
    h.report(on_device("a", 10), on_host("b"), short=1)
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
    h.report(on_device("a"), on_device("b"), short=1)
    assert h.slot("b") == (False, 0, HOST, 1)


def test_a_question_whose_levels_have_no_finite_quantum_is_refused() -> None:
    found = build_offload("fastserve", 8)
    assert found is not None
    question = OffloadQuestion(1, (), (), (), 0, 1, 0, 0, 4, quantum_s=0.01)
    bad = decode(encode(question), OffloadQuestion)
    assert found.decide(bad).offload == ()
    with pytest.raises(MessageError, match="level"):
        found.decide(dataclasses.replace(question, queues=(QueueSize(0, 10**9, 1),)))
