"""The scheduler over replicas: who gets a request, the table of those in flight, and what ingress replicas announce."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from farsight.core.forecast import ForecastMade
from farsight.core.key_sums import part_of
from farsight.core.messages.requests import Demand, Key, OpenRequest, Placed
from farsight.core.request import Request, SamplingParams
from farsight.policies.fleet.events import (
    AbortOnReplica,
    AskIngress,
    AskReplica,
    GlobalEvent,
    GlobalInstruction,
    HistoryLearned,
    IngressAnnounced,
    IngressLost,
    KeysUnknown,
    PlaceRequests,
    ReplicaAway,
    ReplicaDraining,
    ReplicaGone,
    ReplicaUp,
    ReportLost,
)
from farsight.policies.fleet.fleet_replica import Entry, FleetReplica
from farsight.policies.fleet.scheduler import GlobalScheduler
from farsight.policies.placement.base import Choice, LeastWork, LoadChoice, ReplicaLoad, RoundRobin
from farsight.policies.replica.events import ForecastsArrived, RefuseRequest, RequestsAborted, RequestsArrived
from tests.opcodes import num_opcodes
from tests.unit.policies.global_table import (
    ALL_PARTS,
    announce,
    arrive,
    end,
    forecast,
    handle,
    placements,
    ready,
    request,
    router,
    stream,
    sums,
)


def test_round_robin_takes_turns() -> None:
    loads = tuple(ReplicaLoad(name, 0, 0.0) for name in "abc")
    policy = RoundRobin()
    assert [policy.choose(request("r"), (), loads, 0.0).replica for _ in range(5)] == ["a", "b", "c", "a", "b"]


def test_least_work_counts_tokens_not_requests() -> None:
    loads = (ReplicaLoad("a", 1, 500.0), ReplicaLoad("b", 4, 80.0), ReplicaLoad("c", 2, 80.0))
    assert LeastWork().choose(request("r"), (), loads, 0.0).replica == "b", "of equals the first"


def test_work_counts_from_placement_to_the_end() -> None:
    scheduler = router()
    assert arrive(scheduler, request("long", prompt=100), request("r1"), request("r2")) == {
        "a": ["long"],
        "b": ["r1", "r2"],
    }
    assert [load.work_tokens for load in scheduler.loads()] == [110, 40]
    end(scheduler, "long")
    assert [load.work_tokens for load in scheduler.loads()] == [0, 40]
    assert arrive(scheduler, request("r3")) == {"a": ["r3"]}


def test_expected_output_is_the_mean_but_never_more_than_asked_for() -> None:
    scheduler = router(replicas="a")
    arrive(scheduler, request("r0", prompt=1, out=1000))
    assert scheduler.loads()[0].work_tokens == 1001, "nothing is foreseen yet: all that was asked for"
    handle(scheduler, HistoryLearned(forecast(50.0)))
    arrive(scheduler, request("r1", prompt=1, out=1000), request("r2", prompt=1, out=5))
    assert scheduler.loads()[0].work_tokens == 1001 + (1 + 50) + (1 + 5)


def test_work_of_a_resumed_request_is_what_is_known_and_what_may_yet_come() -> None:
    scheduler = router(replicas="a")
    handle(scheduler, HistoryLearned(forecast(50.0)))
    arrive(scheduler, request("r", prompt=7, out=100, attempt=1, resumed=90))
    assert scheduler.loads()[0].work_tokens == 97 + 10


def test_the_demand_is_what_is_in_flight_by_the_best_forecast_there_is() -> None:
    scheduler = router(replicas="a")
    assert scheduler.demand() == Demand(0, 0, 0, 0.0, 0.0, 0.0)
    handle(scheduler, HistoryLearned(forecast(50.0)))
    foreseen = replace(request("r1", prompt=20, out=100), forecast=forecast(30.0))
    arrive(scheduler, request("r0", prompt=10, out=100), foreseen, request("r2", prompt=5, out=8))
    assert scheduler.demand() == Demand(3, 0, 1, 35.0, 0.0, 50.0 + 30.0 + 8.0)
    late = [ForecastMade(name, attempt, forecast(70.0)) for name, attempt in (("r0", 0), ("r2", 1), ("r9", 0))]
    handle(scheduler, ForecastsArrived(tuple(late)))
    assert scheduler.demand().output_tokens == 70.0 + 30.0 + 8.0, "of an attempt that is not here it says nothing"
    end(scheduler, "r0")
    assert scheduler.demand() == Demand(2, 0, 1, 25.0, 0.0, 38.0)


def test_who_waits_for_a_replica_counts_and_takes_its_late_forecast_along() -> None:
    scheduler = router(replicas="")
    arrive(scheduler, request("r0", prompt=10, out=100), request("r1", prompt=7, out=100, attempt=1, resumed=90))
    assert scheduler.demand() == Demand(2, 2, 0, 10.0 + 97.0, 0.0, 100.0 + 10.0)
    handle(scheduler, ForecastsArrived((ForecastMade("r0", 0, forecast(40.0)),)))
    assert scheduler.demand().output_tokens == 40.0 + 10.0
    (placed,) = handle(scheduler, ReplicaUp("a", ready()))
    assert isinstance(placed, PlaceRequests)
    assert placed.requests[0].forecast == forecast(40.0)
    assert scheduler.demand() == Demand(2, 0, 1, 107.0, 0.0, 50.0)


def test_what_another_server_has_is_no_part_of_the_demand() -> None:
    scheduler = router(replicas="a")
    handle(scheduler, ReplicaUp("backend-0", replace(ready("w2"), external=True)))
    assert [life.worker_incarnation for life in scheduler.own_takers()] == ["w1"]
    assert arrive(scheduler, request("r0"), request("r1")) == {"a": ["r0"], "backend-0": ["r1"]}
    assert scheduler.demand() == Demand(1, 0, 1, 10.0, 0.0, 10.0)
    handle(scheduler, ReplicaDraining("a"))
    assert scheduler.own_takers() == []


def test_what_an_earlier_router_placed_is_split_by_the_mean() -> None:
    scheduler = router(replicas="a")
    handle(scheduler, HistoryLearned(forecast(50.0)))
    announce(scheduler, stream("r0", work=200), stream("r1", work=20))
    assert scheduler.demand() == Demand(2, 0, 1, 150.0, 0.0, 50.0 + 20.0)


def test_aborts_go_where_their_request_is() -> None:
    scheduler = router(RoundRobin())
    arrive(scheduler, *(request(f"r{i}") for i in range(4)))
    keys = (("r0", 0), ("r1", 0), ("r2", 0))
    assert handle(scheduler, RequestsAborted(keys)) == [
        AbortOnReplica("a", (("r0", 0), ("r2", 0))),
        AbortOnReplica("b", (("r1", 0),)),
    ]
    assert scheduler.num_in_flight == 1


def test_an_abort_of_what_nobody_placed_is_told_to_every_replica() -> None:
    scheduler = router()
    handle(scheduler, ReplicaAway("b"))
    arrive(scheduler, request("r", attempt=1))
    for key in (("unknown", 2), ("r", 0)):
        aborts = [AbortOnReplica("a", (key,)), AbortOnReplica("b", (key,))]
        assert handle(scheduler, RequestsAborted((key,))) == aborts, "nobody, or nobody any more"
    assert scheduler.num_in_flight == 1, "the newer attempt"


def test_duplicates_and_older_attempts_change_nothing() -> None:
    scheduler = router(RoundRobin())
    arrive(scheduler, request("r", attempt=1))
    assert arrive(scheduler, request("r", attempt=1)) == {}
    assert arrive(scheduler, request("r", attempt=0)) == {}
    end(scheduler, "r", attempt=0)
    assert scheduler.num_in_flight == 1
    end(scheduler, "r", attempt=1)
    assert scheduler.num_in_flight == 0


def test_a_higher_attempt_ends_the_one_before_and_is_placed_anew() -> None:
    scheduler = router(RoundRobin())
    arrive(scheduler, request("r"))
    again = request("r", attempt=1, resumed=3)
    assert handle(scheduler, RequestsArrived((again,))) == [
        AbortOnReplica("a", (("r", 0),)),
        PlaceRequests("b", (again,)),
    ]
    assert [(load.num_requests, load.work_tokens) for load in scheduler.loads()] == [(0, 0), (1, 20)]
    assert scheduler.placed("r", 1) == Placed("r", 1, "b", "w1")
    assert scheduler.placed("r", 0) == Placed("r", 0, "", "")


def test_requests_wait_for_a_replica_in_their_order() -> None:
    scheduler = router(replicas="")
    assert handle(scheduler, RequestsArrived((request("r0"), request("r1")))) == []
    assert handle(scheduler, RequestsArrived((request("r2"),))) == []
    assert scheduler.num_in_flight == 3
    assert scheduler.placed("r0", 0) == Placed("r0", 0, "", "")
    for late in (request("r3"), request("again"), request("again", attempt=1), request("again")):
        arrive(scheduler, late)
    assert handle(scheduler, RequestsAborted((("r3", 0),))) == []
    (placed,) = handle(scheduler, ReplicaUp("a", ready()))
    assert isinstance(placed, PlaceRequests)
    found = [(each.request_id, each.attempt) for each in placed.requests]
    assert found == [("r0", 0), ("r1", 0), ("r2", 0), ("again", 1)]
    assert scheduler.placed("r0", 0) == Placed("r0", 0, "a", "w1")
    assert handle(scheduler, ReplicaUp("a", ready())) == [], "said again: nothing waits any more"


@pytest.mark.parametrize("event", [ReplicaAway("a"), ReplicaDraining("a"), ReplicaGone("a")], ids=lambda e: str(e))
def test_a_replica_that_is_away_or_draining_goes_on_but_gets_nothing_new(event: GlobalEvent) -> None:
    scheduler = router(RoundRobin(), replicas="a")
    arrive(scheduler, request("r0"), request("r1"))
    handle(scheduler, event)
    handle(scheduler, ReplicaUp("b", ready()))
    assert arrive(scheduler, request("r2"), request("r3")) == {"b": ["r2", "r3"]}
    if isinstance(event, ReplicaGone):
        return
    assert scheduler.num_on("a") == 2
    end(scheduler, "r0")
    assert handle(scheduler, RequestsAborted((("r1", 0),))) == [AbortOnReplica("a", (("r1", 0),))]
    assert scheduler.num_on("a") == 0
    handle(scheduler, ReplicaAway("b"))
    assert arrive(scheduler, request("r4")) == {}
    if isinstance(event, ReplicaDraining):
        assert handle(scheduler, ReplicaUp("a", ready())) == [], "it says that it is up, and drains still"
        assert handle(scheduler, ReplicaDraining("a", ends=True)) == []
    assert placements(handle(scheduler, ReplicaUp("a", ready()))) == {"a": ["r4"]}
    assert [life.worker_incarnation for life in scheduler.lives()] == ["w1", "w1"], "the same worker lives"


def test_a_request_runs_on_its_own_weights_alone_and_waits_for_them() -> None:
    scheduler = router(replicas="")
    handle(scheduler, ReplicaUp("a", ready()))
    handle(scheduler, ReplicaUp("b", replace(ready("w2"), model_version=1)))
    first, second = request("r0"), replace(request("r1"), model_version=1)
    assert arrive(scheduler, first, second) == {"a": ["r0"], "b": ["r1"]}
    handle(scheduler, ReplicaAway("a"))
    assert arrive(scheduler, request("r2")) == {}, "it is not refused, and does not go to other weights"
    handle(scheduler, ReplicaGone("b"))
    assert placements(handle(scheduler, ReplicaUp("a", ready()))) == {"a": ["r2"]}


def test_a_replica_gone_takes_its_entries_with_it() -> None:
    scheduler = router(RoundRobin())
    arrive(scheduler, request("r0"), request("r1"))
    handle(scheduler, ReplicaGone("a"))
    assert (scheduler.num_in_flight, scheduler.num_on("a")) == (1, 0)
    assert handle(scheduler, ReplicaGone("a")) == [], "nor does it matter to be told twice"
    assert [load.name for load in scheduler.loads()] == ["b"]
    assert announce(scheduler, stream("r0"), stream("r1", replica="b")) == [
        AskReplica("b", (("r1", 0),)),
        ReportLost("i", (("r0", 0),)),
    ]


def test_a_new_worker_life_drops_what_the_old_one_had() -> None:
    scheduler = router(RoundRobin())
    arrive(scheduler, request("r0"), request("r1"))
    handle(scheduler, ReplicaUp("a", ready("w2")))
    assert (scheduler.num_on("a"), scheduler.num_on("b")) == (0, 1)
    assert [life.worker_incarnation for life in scheduler.lives()] == ["w2", "w1"]
    assert announce(scheduler, stream("r0"), stream("r1", replica="b")) == [
        AskReplica("b", (("r1", 0),)),
        ReportLost("i", (("r0", 0),)),
    ]


def test_a_request_goes_where_it_fits_and_is_refused_with_the_numbers_where_it_fits_nowhere() -> None:
    scheduler = router(replicas="")
    handle(scheduler, ReplicaUp("small", ready(max_model_len=50)))
    handle(scheduler, ReplicaUp("large", ready(max_model_len=100)))
    assert arrive(scheduler, request("r0", prompt=90), request("r1", prompt=90)) == {"large": ["r0", "r1"]}
    assert arrive(scheduler, request("r2", prompt=40)) == {"small": ["r2"]}
    (refusal,) = handle(scheduler, RequestsArrived((request("r", prompt=91, attempt=2),)))
    assert isinstance(refusal, RefuseRequest)
    assert (refusal.request_id, refusal.attempt, refusal.field) == ("r", 2, "max_tokens")
    assert "101 tokens" in refusal.message
    assert "at most 100" in refusal.message
    assert scheduler.num_in_flight == 3


def test_a_waiting_request_that_turns_out_too_long_is_refused() -> None:
    scheduler = router(replicas="")
    arrive(scheduler, request("r", prompt=91), request("s"))
    instructions = handle(scheduler, ReplicaUp("a", ready(max_model_len=100)))
    assert [type(instruction) for instruction in instructions] == [PlaceRequests, RefuseRequest]
    assert scheduler.num_in_flight == 1


def test_why_a_request_is_where_it_is() -> None:
    scheduler = router(RoundRobin(), "a")
    arrive(scheduler, request("r0"))
    announce(scheduler, stream("r0"), stream("adopted"))
    assert scheduler.choice("r0") == Choice("a", "in turn")
    assert scheduler.choice("adopted") is None
    assert scheduler.choice("nowhere") is None
    least = router(LeastWork(), "a")
    arrive(least, request("r0"))
    assert least.choice("r0") == LoadChoice("a", "least work")


def test_what_only_our_own_engine_can_say_is_not_asked_of_other_servers() -> None:
    scheduler = GlobalScheduler(LeastWork())
    handle(scheduler, ReplicaUp("backend-0", replace(ready("s1"), external=True)))
    logged = Request("r", 0, "i", (1,), SamplingParams(10, logprobs=2))
    (refused,) = handle(scheduler, RequestsArrived((logged,)))
    assert isinstance(refused, RefuseRequest) and refused.field == "logprobs", "there are only other servers"
    handle(scheduler, ReplicaUp("0", ready()))
    for index in range(4):
        logged = Request(f"r{index}", 0, "i", (1,), SamplingParams(10, logprobs=2))
        (placed,) = handle(scheduler, RequestsArrived((logged,)))
        assert isinstance(placed, PlaceRequests) and placed.replica == "0"
    (plain,) = handle(scheduler, RequestsArrived((request("plain"),)))
    assert isinstance(plain, PlaceRequests) and plain.replica == "backend-0"
    handle(scheduler, ReplicaAway("0"))
    late = Request("late", 0, "i", (1,), SamplingParams(10, logprobs=2))
    assert handle(scheduler, RequestsArrived((late,))) == [], "it waits for our own engine"


def test_an_empty_replica_has_exactly_no_work() -> None:
    replica = FleetReplica(ReplicaLoad("a", 0, 0.0))
    for name, work_tokens in (("x", 0.1), ("y", 0.2), ("z", 0.3)):
        replica.enter(name, Entry(0, "i", replica="a", work_tokens=work_tokens))
    for name in ("z", "x", "y"):
        replica.remove(name)
    assert replica.load.num_requests == 0
    assert f"{replica.load.work_tokens}" == "0.0"  # neither a rounding error nor -0.0


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
    assert handle(scheduler, KeysUnknown("a", keys)) == [ReportLost("i", (("r0", 0),)), ReportLost("j", (("r2", 0),))]
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


def test_streams_are_asked_for_where_their_sums_differ() -> None:
    scheduler = router(RoundRobin())
    arrive(scheduler, request("r0"), request("r1"))
    asked = IngressAnnounced("i", sums(("r0", 0), ("r1", 1)))
    assert handle(scheduler, asked) == [AskIngress("i", (part_of("r1"),))]
    listed = replace(asked, listed=(part_of("r1"),), open=(stream("r1", 1, "", ""),))
    assert handle(scheduler, listed) == [ReportLost("i", (("r1", 1),))], "its parts are not asked for again"
    assert handle(scheduler, IngressAnnounced("i", b"")) == [AskIngress("i", ALL_PARTS)], "sums of another version"


def test_a_replica_is_asked_about_what_its_sums_do_not_hold() -> None:
    scheduler = router(RoundRobin())
    arrive(scheduler, request("r0"), request("r1"), request("r2"))
    assert handle(scheduler, ReplicaUp("a", ready(), sums=sums(("r0", 0), ("r2", 0)))) == []
    assert handle(scheduler, ReplicaUp("a", ready(), sums=sums(("r0", 0)))) == [AskReplica("a", (("r2", 0),))]
    assert handle(scheduler, ReplicaUp("b", ready(), sums=sums())) == [AskReplica("b", (("r1", 0),))]


def test_what_is_repeated_costs_the_same_at_a_hundred_requests_and_at_ten_thousand() -> None:
    costs = []
    for count in (100, 10_000):
        scheduler, keys = router(replicas="a"), [(str(number), 0) for number in range(count)]
        scheduler.handle(RequestsArrived(tuple(request(name, prompt=1) for name, _ in keys)), 0.0)
        same = sums(*keys)
        repeated: tuple[GlobalEvent, ...] = (IngressAnnounced("i", same), ReplicaUp("a", ready(), sums=same))
        assert [scheduler.handle(each, 0.0) for each in repeated] == [[], []]
        costs.append([num_opcodes(partial(scheduler.handle, each, 0.0)) for each in repeated])
        costs[-1].append(num_opcodes(scheduler.demand))
    assert costs[0] == costs[1]
