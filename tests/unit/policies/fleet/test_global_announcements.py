"""The scheduler over replicas: what ingress replicas announce, and what becomes of those that are lost."""

from __future__ import annotations

import pytest

from core.messages.requests import Key, Placed
from policies.fleet.events import (
    AbortOnReplica,
    AskReplica,
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


def test_a_new_router_adopts_before_it_has_heard_of_the_replica() -> None:
    scheduler = router(replicas="")
    assert announce(scheduler, stream("r")) == [], "it cannot ask yet"
    assert scheduler.num_on("a") == 1
    assert handle(scheduler, ReplicaUp("a", ready())) == []
    assert announce(scheduler, stream("r")) == [AskReplica("a", (("r", 0),))]


def test_what_was_adopted_for_an_older_worker_life_is_lost() -> None:
    scheduler = router(replicas="")
    announce(scheduler, stream("r"))
    handle(scheduler, ReplicaUp("a", ready("w2")))
    assert announce(scheduler, stream("r")) == [ReportLost("i", (("r", 0),))]


def test_an_announced_request_that_was_never_placed_is_lost() -> None:
    assert announce(router(), stream("r", 4, replica="", incarnation="")) == [ReportLost("i", (("r", 4),))]


def test_an_announced_request_of_an_older_worker_life_is_lost() -> None:
    assert announce(router(), stream("r", incarnation="w0")) == [ReportLost("i", (("r", 0),))]


def test_an_announced_request_that_waits_for_a_replica_is_neither_lost_nor_asked_about() -> None:
    scheduler = router(replicas="")
    arrive(scheduler, request("r"))
    assert announce(scheduler, stream("r", replica="", incarnation="")) == []
    assert scheduler.num_in_flight == 1


def test_a_replica_that_is_away_is_not_asked() -> None:
    scheduler = router(replicas="a")
    arrive(scheduler, request("r"))
    handle(scheduler, ReplicaAway("a"))
    assert announce(scheduler, stream("r")) == []
    assert scheduler.num_in_flight == 1


def test_an_announcement_older_than_what_is_known_changes_nothing() -> None:
    scheduler = router()
    arrive(scheduler, request("r", attempt=2))
    assert announce(scheduler, stream("r", 1)) == []
    assert scheduler.placed("r", 2).replica == "a"


def test_what_an_ingress_replica_no_longer_announces_is_aborted() -> None:
    scheduler = router(RoundRobin())
    arrive(scheduler, request("r0"), request("r1"), request("other", ingress="j"))
    assert announce(scheduler, stream("r0")) == [AbortOnReplica("b", (("r1", 0),)), AskReplica("a", (("r0", 0),))]
    assert scheduler.num_in_flight == 2, "another ingress replica's are not its to close"


def test_what_waits_and_is_no_longer_announced_is_forgotten() -> None:
    scheduler = router(replicas="")
    arrive(scheduler, request("r"))
    assert announce(scheduler) == []
    assert scheduler.num_in_flight == 0


def test_what_the_scheduler_does_not_know_is_lost_once() -> None:
    scheduler = router(RoundRobin())
    arrive(scheduler, request("r0", ingress="i"), request("r1"), request("r2", ingress="j"), request("r3"))
    keys: tuple[Key, ...] = (("r0", 0), ("r2", 0))
    assert handle(scheduler, KeysUnknown("a", keys)) == [
        ReportLost("i", (("r0", 0),)),
        ReportLost("j", (("r2", 0),)),
    ]
    assert handle(scheduler, KeysUnknown("a", keys)) == []
    assert scheduler.num_in_flight == 2


@pytest.mark.parametrize("unknown", [KeysUnknown("a", (("r", 0),)), KeysUnknown("b", (("r", 1),))])
def test_an_answer_about_an_older_attempt_or_from_another_replica_loses_nothing(unknown: KeysUnknown) -> None:
    scheduler = router()
    arrive(scheduler, request("r", attempt=1))
    assert handle(scheduler, unknown) == []
    assert scheduler.num_in_flight == 1


def test_a_lost_ingress_replica_takes_its_requests_with_it() -> None:
    scheduler = router(RoundRobin())
    arrive(scheduler, request("r0"), request("r1", ingress="j"), request("r2"))
    assert handle(scheduler, IngressLost("i")) == [AbortOnReplica("a", (("r0", 0), ("r2", 0)))]
    assert scheduler.num_in_flight == 1


def test_a_lost_ingress_replica_takes_what_waits_with_it() -> None:
    scheduler = router(replicas="")
    arrive(scheduler, request("r0"), request("r1", ingress="j"))
    assert handle(scheduler, IngressLost("i")) == []
    assert placements(handle(scheduler, ReplicaUp("a", ready()))) == {"a": ["r1"]}
