"""Which waiting requests are recalled and where they go: the rule alone, and the scheduler over replicas with it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from farsight.core.costs import StepCost
from farsight.core.messages.plans import StartedRequest, WorkerReady
from farsight.core.messages.requests import Key
from farsight.core.request import Request
from farsight.policies.fleet.events import (
    AskReplica,
    KeysUnknown,
    PlaceRequests,
    RecallRequests,
    ReplicaDraining,
    ReplicaUp,
    RequestsReturned,
    RequestsStarted,
    TimePassed,
)
from farsight.policies.fleet.scheduler import GlobalScheduler
from farsight.policies.moves.recall import ASK_AGAIN_S, MAX_RECALLS, WAIT_S, Crowd, Recalled, RecallRule, WaitingRequest
from farsight.policies.placement.base import LeastWork, RoundRobin
from farsight.policies.replica.events import RequestsAborted, RequestsArrived
from tests.unit.policies.global_table import ready, request, sums

COST = StepCost(base_s=0.01, prefill_token_s=1e-3, decode_seq_s=1e-4, context_token_s=0.0)


def crowd(name: str, num: int = 0, waiting: Sequence[WaitingRequest] = (), **fields: object) -> Crowd:
    """A replica for 1,000 tokens; each of its requests is predicted to hold 100."""
    given = {"takes": True, "draining": False, "num_requests": num, "tokens": 100.0 * num, "capacity_tokens": 1000}
    return Crowd(name, is_crowded=bool(waiting), waiting=list(waiting), **{"model_version": 0, **given, **fields})  # type: ignore[arg-type]


def waits(name: str, since: float = 0.0, tokens: float = 100.0, **fields: float) -> WaitingRequest:
    return WaitingRequest((name, 0), since, tokens, **fields)  # type: ignore[arg-type]


def recalled(*crowds: Crowd, now: float = 10.0, cost: StepCost | None = None, places: int = 4) -> list[Recalled]:
    return RecallRule(places).choose(crowds, cost, now)


def test_the_oldest_go_first_and_only_as_many_as_find_room() -> None:
    full = crowd("a", 7, [waits("r0", 1.0), waits("r1", 2.0), waits("r2", 3.0)])
    assert recalled(full, crowd("b", 2)) == [Recalled("a", (("r0", 0), ("r1", 0)), "starved head")]
    longest = crowd("c", 7, [waits("s0", 0.5)])
    found = recalled(crowd("a", 7, [waits("r0", 1.0)]), longest, crowd("b", 3))
    assert found == [Recalled("c", (("s0", 0),), "starved head")], "the longest wait comes first"


@pytest.mark.parametrize(
    ("request_", "taker"),
    [
        pytest.param(waits("r", 10.0 - WAIT_S / 2), crowd("b"), id="has just come"),
        pytest.param(waits("r", num_recalls=MAX_RECALLS), crowd("b"), id="went to and fro"),
        pytest.param(waits("r", asked_at=9.5), crowd("b"), id="was asked for"),
        pytest.param(waits("r", tokens=951), crowd("b"), id="would fill the memory"),
        pytest.param(waits("r"), crowd("b", 4), id="no place"),
        pytest.param(waits("r"), crowd("b", 1, [waits("s", 9.9)]), id="others wait there"),
        pytest.param(waits("r"), crowd("b", takes=False), id="away"),
        pytest.param(waits("r"), crowd("b", model_version=1), id="other weights"),
    ],
)
def test_a_request_stays_where_moving_it_would_not_help(request_: WaitingRequest, taker: Crowd) -> None:
    assert recalled(crowd("a", 7, [request_]), taker) == []


def test_a_request_whose_prompt_is_cached_waits_as_long_as_computing_that_again_takes() -> None:
    full, again_s = crowd("a", 7, [waits("r", 0.0, hit_len=2000)]), COST.prefill_s(2000)
    assert again_s > 2.0
    assert recalled(full, crowd("b"), now=WAIT_S + again_s - 0.01, cost=COST) == []
    assert recalled(full, crowd("b"), now=WAIT_S + again_s, cost=COST) != []


def test_a_draining_replica_gives_back_all_that_waits_if_another_takes_requests() -> None:
    leaving = crowd("a", 7, [waits("r0", 9.9, hit_len=900), waits("r1", 9.9, tokens=5000)], draining=True, takes=False)
    assert recalled(leaving, crowd("b", 4), cost=COST) == [Recalled("a", (("r0", 0), ("r1", 0)), "drain")]
    assert recalled(leaving, crowd("b", takes=False)) == []


class Fleet:
    """A scheduler over replicas that recalls, round-robin over a and b unless told otherwise."""

    def __init__(self, scheduler: GlobalScheduler | None = None) -> None:
        self.scheduler = scheduler or GlobalScheduler(RoundRobin(), RecallRule(places=4))
        self.now = 0.0
        for name in "ab":
            self.tell(ReplicaUp(name, ready()))

    def tell(self, event: object, now: float | None = None) -> list[object]:
        self.now = self.now if now is None else now
        out = self.scheduler.handle(event, self.now)  # type: ignore[arg-type]
        self.scheduler.check_integrity()
        return list(out)

    def place(self, *requests: Request) -> None:
        self.tell(RequestsArrived(requests))

    def start(self, *names: str) -> None:
        self.tell(RequestsStarted(tuple(StartedRequest(name, 0, 0, 0.1) for name in names)))

    def where(self, name: str) -> str:
        return self.scheduler.placed(name, 0).replica


def fleet_with_a_wait() -> tuple[Fleet, Request]:
    """``late`` waits on a, all others run; b has room."""
    fleet, late = Fleet(), request("late")
    fleet.place(request("r0"), request("r1"), late)
    fleet.start("r0", "r1")
    assert fleet.where("late") == "a"
    return fleet, late


def test_what_waits_is_recalled_and_placed_where_it_can_run() -> None:
    fleet, late = fleet_with_a_wait()
    assert fleet.tell(TimePassed(), WAIT_S / 2) == []
    assert fleet.tell(TimePassed(), 1.0) == [RecallRequests("a", (("late", 0),))]
    assert fleet.tell(TimePassed(), 1.1) == [], "asked for already"
    assert fleet.tell(TimePassed(), 1.0 + ASK_AGAIN_S) == [RecallRequests("a", (("late", 0),))]
    assert fleet.tell(RequestsReturned("a", (late,))) == [PlaceRequests("b", (late,))]
    told = fleet.scheduler.told("late")
    assert (told["moved_from"], told["because"], told["waited_there_s"]) == ("a", "starved head", 1.0 + ASK_AGAIN_S)
    assert fleet.tell(RequestsReturned("a", (late,))) == [], "it has gone on already"
    fleet.start("late")
    assert fleet.tell(TimePassed(), 90.0) == []


def test_a_request_that_left_meanwhile_does_not_come_back() -> None:
    fleet, late = fleet_with_a_wait()
    fleet.tell(TimePassed(), 1.0)
    fleet.tell(RequestsAborted((("late", 0),)))
    assert fleet.tell(RequestsReturned("a", (late,))) == []
    assert fleet.scheduler.num_in_flight == 2


def test_a_replica_that_may_have_given_a_request_back_is_not_asked_whether_it_has_it() -> None:
    fleet, late = fleet_with_a_wait()
    fleet.tell(TimePassed(), 1.0)
    without = sums(("r0", 0))
    assert fleet.tell(ReplicaUp("a", ready(), sums=without), 1.5) == []
    for number in range(20):  # a state every second, a look four times a second
        fleet.tell(TimePassed(), 2.0 + 0.25 * number)
        asked = fleet.tell(ReplicaUp("a", ready(), sums=without)) if number % 4 == 0 else []
        if asked:
            break
    assert asked == [AskReplica("a", (("late", 0),))], "the answer is late: it may be lost"
    assert fleet.now < 4.0, "however often it is recalled"
    fleet.tell(RequestsReturned("a", (late,)))
    assert fleet.tell(KeysUnknown("a", (("late", 0),))) == [], "it is on b"


def test_without_a_rule_nothing_is_recalled() -> None:
    fleet = Fleet(GlobalScheduler(LeastWork()))
    fleet.place(*(request(f"r{index}") for index in range(9)))
    assert fleet.tell(TimePassed(), 100.0) == [] and not fleet.scheduler.recalls


def test_a_drain_sends_what_waits_to_the_others_and_back_where_there_are_none() -> None:
    fleet, late = fleet_with_a_wait()
    fleet.tell(ReplicaDraining("a"))
    assert fleet.tell(TimePassed(), 0.25) == [RecallRequests("a", (("late", 0),))]
    assert fleet.tell(RequestsReturned("a", (late,))) == [PlaceRequests("b", (late,))]
    fleet.tell(ReplicaDraining("b"))
    assert fleet.tell(TimePassed(), 9.0) == [], "no other takes requests"


def test_a_recalled_request_keeps_to_replicas_that_can_hold_it() -> None:
    fleet = Fleet()
    small = WorkerReady("w2", 100, 4, 25, False, 100)
    fleet.tell(ReplicaUp("b", small))
    long = request("long", prompt=20, out=20)
    fleet.place(long)
    fleet.tell(TimePassed(), 1.0)
    back = fleet.tell(RequestsReturned("a", (long,)))
    assert back == [PlaceRequests("a", (long,))], "b holds 25 tokens"


def test_looking_costs_nothing_where_nothing_waits() -> None:
    keys: list[Key] = []
    fleet = Fleet()
    for index in range(8):
        fleet.place(request(f"r{index}"))
        keys.append((f"r{index}", 0))
    fleet.start(*(name for name, _ in keys))
    assert fleet.tell(TimePassed(), math.inf) == []
