"""The scheduler over replicas: what ingress replicas announce, and what becomes of those that are lost."""

from __future__ import annotations

import pytest

from core.messages.requests import Key, OpenRequest, Placed
from policies.fleet.events import (
    AbortOnReplica,
    AskReplica,
    GlobalEvent,
    GlobalInstruction,
    IngressLost,
    KeysUnknown,
    ReplicaAway,
    ReplicaUp,
    ReportLost,
)
from policies.placement.base import RoundRobin
from tests.unit.policies.global_table import announce, arrive, end, handle, placements, ready, request, router, stream


def test_a_new_router_adopts_what_ingress_replicas_announce() -> None:
    scheduler = router()
    assert announce(scheduler, stream("r0", 3, work=25), stream("r1", 0, "b")) == [
        AskReplica("a", (("r0", 3),)),
        AskReplica("b", (("r1", 0),)),
    ]
    assert [load.work_tokens for load in scheduler.loads()] == [25, 20]
    assert scheduler.placed("r0", 3) == Placed("r0", 3, "a", "w1")
    end(scheduler, "r0", attempt=3)
    assert scheduler.num_in_flight == 1


@pytest.mark.parametrize(
    ("life", "then"),
    [("w1", AskReplica("a", (("r", 0),))), ("w2", ReportLost("i", (("r", 0),)))],
    ids=["same", "newer"],
)
def test_a_new_router_adopts_before_it_has_heard_of_the_replica(life: str, then: GlobalInstruction) -> None:
    scheduler = router(replicas="")
    assert announce(scheduler, stream("r")) == [], "it cannot ask yet"
    assert scheduler.num_on("a") == 1
    assert handle(scheduler, ReplicaUp("a", ready(life))) == []
    assert announce(scheduler, stream("r")) == [then]


@pytest.mark.parametrize(
    ("announced", "lost"),
    [(stream("r", 4, replica="", incarnation=""), ("r", 4)), (stream("r", incarnation="w0"), ("r", 0))],
    ids=["never placed", "of an older worker life"],
)
def test_what_no_replica_can_have_is_lost(announced: OpenRequest, lost: Key) -> None:
    assert announce(router(), announced) == [ReportLost("i", (lost,))]


@pytest.mark.parametrize(
    ("replicas", "attempt", "event", "announced"),
    [
        ("", 0, None, stream("r", replica="", incarnation="")),
        ("a", 0, ReplicaAway("a"), stream("r")),
        ("ab", 2, None, stream("r", 1)),
    ],
    ids=["it waits for a replica", "its replica is away", "the announcement is older than what is known"],
)
def test_some_are_neither_lost_nor_asked_about(
    replicas: str, attempt: int, event: GlobalEvent | None, announced: OpenRequest
) -> None:
    scheduler = router(replicas=replicas)
    arrive(scheduler, request("r", attempt=attempt))
    if event is not None:
        handle(scheduler, event)
    assert announce(scheduler, announced) == []
    assert scheduler.num_in_flight == 1
    assert scheduler.placed("r", attempt).replica == replicas[:1]


def test_what_an_ingress_replica_no_longer_announces_is_aborted() -> None:
    scheduler = router(RoundRobin())
    arrive(scheduler, request("r0"), request("r1"), request("other", ingress="j"))
    assert announce(scheduler, stream("r0")) == [AbortOnReplica("b", (("r1", 0),)), AskReplica("a", (("r0", 0),))]
    assert scheduler.num_in_flight == 2, "another ingress replica's are not its to close"
    waiting = router(replicas="")
    arrive(waiting, request("r"))
    assert announce(waiting) == []
    assert waiting.num_in_flight == 0


def test_what_the_scheduler_does_not_know_is_lost_once() -> None:
    scheduler = router(RoundRobin())
    arrive(scheduler, request("r0", ingress="i"), request("r1"), request("r2", ingress="j"), request("r3", attempt=1))
    keys: tuple[Key, ...] = (("r0", 0), ("r2", 0))
    assert handle(scheduler, KeysUnknown("a", keys)) == [
        ReportLost("i", (("r0", 0),)),
        ReportLost("j", (("r2", 0),)),
    ]
    for nothing in (KeysUnknown("a", keys), KeysUnknown("b", (("r3", 0),)), KeysUnknown("a", (("r3", 1),))):
        assert handle(scheduler, nothing) == [], "said before, of an older attempt, from another replica"
    assert scheduler.num_in_flight == 2


def test_a_lost_ingress_replica_takes_its_requests_with_it() -> None:
    scheduler = router(RoundRobin())
    arrive(scheduler, request("r0"), request("r1", ingress="j"), request("r2"))
    assert handle(scheduler, IngressLost("i")) == [AbortOnReplica("a", (("r0", 0), ("r2", 0)))]
    assert scheduler.num_in_flight == 1
    waiting = router(replicas="")
    arrive(waiting, request("r0"), request("r1", ingress="j"))
    assert handle(waiting, IngressLost("i")) == []
    assert placements(handle(waiting, ReplicaUp("a", ready()))) == {"a": ["r1"]}
