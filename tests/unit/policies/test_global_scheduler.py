"""Placement over replicas: events in, instructions out."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from core.costs import StepCost
from core.errors import ConfigError
from core.messages import FinishedSequence, Key, OpenRequest, Placed, WorkerReady
from core.request import Request, SamplingParams, SequenceStatus
from kvcache.prefix import hash_blocks
from policies.builders import build_router
from policies.e2_profiles import from_step_cost
from policies.e2_router import E2Choice, E2Router
from policies.global_events import (
    AbortOnReplica,
    AskReplica,
    GlobalEvent,
    GlobalInstruction,
    IngressAnnounced,
    IngressLost,
    KeysUnknown,
    MeanOutputLen,
    PlaceRequests,
    PrefixesEvicted,
    ReplicaAway,
    ReplicaDraining,
    ReplicaGone,
    ReplicaUp,
    ReportLost,
    RequestsEnded,
    RequestsStarted,
    StartedRequest,
)
from policies.global_scheduler import GlobalScheduler
from policies.least_work import LeastWork
from policies.placement import Choice, LoadChoice, Placement, ReplicaLoad
from policies.replica_events import RefuseRequest, RequestsAborted, RequestsArrived
from policies.round_robin import RoundRobin


def request(
    name: str, prompt: int = 10, out: int = 10, attempt: int = 0, ingress: str = "i", resumed: int = 0
) -> Request:
    return Request(name, attempt, ingress, (1,) * prompt, SamplingParams(out), (2,) * resumed)


def ready(incarnation: str = "w1", max_model_len: int = 5000) -> WorkerReady:
    return WorkerReady(incarnation, 100, 4, max_model_len, False, 100)


def handle(scheduler: GlobalScheduler, event: GlobalEvent) -> list[GlobalInstruction]:
    instructions = scheduler.handle(event, 0.0)
    scheduler.check_integrity()
    return instructions


def router(placement: Placement | None = None, replicas: str = "ab") -> GlobalScheduler:
    scheduler = GlobalScheduler(placement or LeastWork())
    for name in replicas:
        handle(scheduler, ReplicaUp(name, ready()))
    return scheduler


def arrive(scheduler: GlobalScheduler, *requests: Request) -> dict[str, list[str]]:
    """{replica: ids placed there}"""
    return placements(handle(scheduler, RequestsArrived(requests)))


def placements(instructions: list[GlobalInstruction]) -> dict[str, list[str]]:
    placed: dict[str, list[str]] = {}
    for instruction in instructions:
        assert isinstance(instruction, PlaceRequests)
        placed[instruction.replica] = [each.request_id for each in instruction.requests]
    return placed


def end(scheduler: GlobalScheduler, name: str, attempt: int = 0) -> None:
    finished = FinishedSequence(name, attempt, SequenceStatus.FINISHED_STOPPED, 3)
    assert handle(scheduler, RequestsEnded((finished,))) == []


def stream(name: str, attempt: int = 0, replica: str = "a", incarnation: str = "w1", work: int = 20) -> OpenRequest:
    return OpenRequest(name, attempt, replica, incarnation, work)


def announce(scheduler: GlobalScheduler, *streams: OpenRequest, ingress: str = "i") -> list[GlobalInstruction]:
    return handle(scheduler, IngressAnnounced(ingress, streams))


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
    handle(scheduler, MeanOutputLen(50.0))
    arrive(scheduler, request("r1", prompt=1, out=1000), request("r2", prompt=1, out=5))
    assert scheduler.loads()[0].work_tokens == 1001 + (1 + 50) + (1 + 5)


def test_work_of_a_resumed_request_is_what_is_known_and_what_may_yet_come() -> None:
    scheduler = router(replicas="a")
    handle(scheduler, MeanOutputLen(50.0))
    arrive(scheduler, request("r", prompt=7, out=100, attempt=1, resumed=90))
    assert scheduler.loads()[0].work_tokens == 97 + 10


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
    assert handle(scheduler, RequestsAborted((("unknown", 2),))) == [
        AbortOnReplica("a", (("unknown", 2),)),
        AbortOnReplica("b", (("unknown", 2),)),
    ]


def test_an_abort_of_an_attempt_already_replaced_is_told_to_every_replica_and_leaves_the_newer() -> None:
    scheduler = router()
    arrive(scheduler, request("r", attempt=1))
    assert handle(scheduler, RequestsAborted((("r", 0),))) == [
        AbortOnReplica("a", (("r", 0),)),
        AbortOnReplica("b", (("r", 0),)),
    ]
    assert scheduler.num_in_flight == 1


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
    assert placements(handle(scheduler, ReplicaUp("a", ready()))) == {"a": ["r0", "r1", "r2"]}
    assert scheduler.placed("r0", 0) == Placed("r0", 0, "a", "w1")
    assert handle(scheduler, ReplicaUp("a", ready())) == [], "said again: nothing waits any more"


def test_a_waiting_request_that_is_aborted_is_not_placed() -> None:
    scheduler = router(replicas="")
    arrive(scheduler, request("r0"), request("r1"))
    assert handle(scheduler, RequestsAborted((("r0", 0),))) == []
    assert placements(handle(scheduler, ReplicaUp("a", ready()))) == {"a": ["r1"]}


def test_of_a_waiting_request_only_the_highest_attempt_is_placed() -> None:
    scheduler = router(replicas="")
    arrive(scheduler, request("r"))
    arrive(scheduler, request("r", attempt=1))
    arrive(scheduler, request("r"))
    (instruction,) = handle(scheduler, ReplicaUp("a", ready()))
    assert instruction == PlaceRequests("a", (request("r", attempt=1),))


@pytest.mark.parametrize("event", [ReplicaAway("a"), ReplicaDraining("a"), ReplicaGone("a")], ids=lambda e: str(e))
def test_nothing_new_goes_to_a_replica_that_is_away_draining_or_gone(event: GlobalEvent) -> None:
    scheduler = router(RoundRobin())
    handle(scheduler, event)
    assert arrive(scheduler, request("r0"), request("r1")) == {"b": ["r0", "r1"]}
    handle(scheduler, ReplicaAway("b"))
    assert arrive(scheduler, request("r2")) == {}
    assert scheduler.num_in_flight == 3


@pytest.mark.parametrize("event", [ReplicaAway("a"), ReplicaDraining("a")], ids=lambda e: str(e))
def test_what_runs_on_a_replica_that_is_away_or_draining_goes_on(event: GlobalEvent) -> None:
    scheduler = router(replicas="a")
    arrive(scheduler, request("r0"), request("r1"))
    handle(scheduler, event)
    assert scheduler.num_on("a") == 2
    end(scheduler, "r0")
    assert handle(scheduler, RequestsAborted((("r1", 0),))) == [AbortOnReplica("a", (("r1", 0),))]
    assert scheduler.num_on("a") == 0


def test_a_replica_that_was_away_gets_what_waited() -> None:
    scheduler = router(replicas="a")
    arrive(scheduler, request("r0"))
    handle(scheduler, ReplicaAway("a"))
    arrive(scheduler, request("r1"))
    assert placements(handle(scheduler, ReplicaUp("a", ready()))) == {"a": ["r1"]}
    assert scheduler.num_on("a") == 2, "the same worker life: what it ran before is still there"


def test_a_draining_replica_that_says_it_is_up_gets_nothing_still() -> None:
    scheduler = router(replicas="a")
    handle(scheduler, ReplicaDraining("a"))
    arrive(scheduler, request("r"))
    assert handle(scheduler, ReplicaUp("a", ready())) == []
    assert placements(handle(scheduler, ReplicaUp("b", ready()))) == {"b": ["r"]}


def test_a_replica_gone_takes_its_entries_with_it() -> None:
    scheduler = router(RoundRobin())
    arrive(scheduler, request("r0"), request("r1"))
    handle(scheduler, ReplicaGone("a"))
    assert (scheduler.num_in_flight, scheduler.num_on("a")) == (1, 0)
    assert handle(scheduler, ReplicaGone("a")) == [], "nor does it matter to be told twice"
    assert [load.name for load in scheduler.loads()] == ["b"]


def test_a_new_worker_life_drops_what_the_old_one_had() -> None:
    scheduler = router(RoundRobin())
    arrive(scheduler, request("r0"), request("r1"))
    handle(scheduler, ReplicaUp("a", ready("w2")))
    assert (scheduler.num_on("a"), scheduler.num_on("b")) == (0, 1)
    assert announce(scheduler, stream("r0"), stream("r1", replica="b")) == [
        AskReplica("b", (("r1", 0),)),
        ReportLost("i", (("r0", 0),)),
    ]


def test_the_latest_worker_life_of_every_replica_is_known() -> None:
    scheduler = router()
    handle(scheduler, ReplicaUp("a", ready("w2")))
    handle(scheduler, ReplicaAway("b"))
    announce(scheduler, stream("r", replica="unheard of"))
    assert [life.worker_incarnation for life in scheduler.lives()] == ["w2", "w1"]


def test_a_request_goes_to_a_replica_where_it_fits() -> None:
    scheduler = router(replicas="")
    handle(scheduler, ReplicaUp("small", ready(max_model_len=50)))
    handle(scheduler, ReplicaUp("large", ready(max_model_len=100)))
    assert arrive(scheduler, request("r0", prompt=90), request("r1", prompt=90)) == {"large": ["r0", "r1"]}
    assert arrive(scheduler, request("r2", prompt=40)) == {"small": ["r2"]}


def test_a_request_too_long_for_every_replica_is_refused_with_the_numbers() -> None:
    scheduler = router(replicas="")
    handle(scheduler, ReplicaUp("small", ready(max_model_len=50)))
    handle(scheduler, ReplicaUp("large", ready(max_model_len=100)))
    (refusal,) = handle(scheduler, RequestsArrived((request("r", prompt=91, attempt=2),)))
    assert isinstance(refusal, RefuseRequest)
    assert (refusal.request_id, refusal.attempt, refusal.field) == ("r", 2, "max_tokens")
    assert "101 tokens" in refusal.message
    assert "at most 100" in refusal.message
    assert scheduler.num_in_flight == 0


def test_a_waiting_request_that_turns_out_too_long_is_refused() -> None:
    scheduler = router(replicas="")
    arrive(scheduler, request("r", prompt=91), request("s"))
    instructions = handle(scheduler, ReplicaUp("a", ready(max_model_len=100)))
    assert [type(instruction) for instruction in instructions] == [PlaceRequests, RefuseRequest]
    assert scheduler.num_in_flight == 1


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


@pytest.mark.parametrize("seed", range(5))
def test_random_lives_leave_nothing_in_the_table(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = router(LeastWork(), "abc")
    alive: set[str] = set()
    for i in range(300):
        arrive(scheduler, request(f"r{i}", prompt=rng.randint(1, 500), out=rng.randint(1, 500)))
        alive.add(f"r{i}")
        handle(scheduler, MeanOutputLen(rng.uniform(1, 500)))
        for name in rng.sample(sorted(alive), k=min(len(alive), rng.randint(0, 2))):
            alive.discard(name)
            if rng.random() < 0.5:
                end(scheduler, name)
            else:
                handle(scheduler, RequestsAborted(((name, 0),)))
    assert scheduler.num_in_flight == len(alive)
    announce(scheduler)
    assert scheduler.num_in_flight == 0


def test_the_preset_names_the_placement_and_the_setting_overrides_it() -> None:
    build_router("fcfs").check_integrity()
    build_router("fcfs", "least-work").check_integrity()
    with pytest.raises(ConfigError, match=r"scheduler\.placement.*round-robin, least-work"):
        build_router("fcfs", "random")


class Listener(Placement):
    """Places in turn and writes down what it hears."""

    def __init__(self, block_size: int = 0) -> None:
        self.block_size = block_size
        self.heard: list[tuple[object, ...]] = []
        self.loads: list[tuple[ReplicaLoad, ...]] = []

    def choose(self, request: Request, prefix: Sequence[int], loads: tuple[ReplicaLoad, ...], now: float) -> Choice:
        self.heard.append(("choose", request.request_id, tuple(prefix), now))
        self.loads.append(loads)
        return Choice(loads[0].name, "first")

    def replica_up(self, name: str, capacity: int) -> None:
        self.heard.append(("up", name, capacity))

    def replica_gone(self, name: str) -> None:
        self.heard.append(("gone", name))

    def started(self, request_id: str, cached_len: int, queue_s: float, now: float) -> None:
        self.heard.append(("started", request_id, cached_len, queue_s, now))

    def ended(self, request_id: str, output_len: int | None, now: float) -> None:
        self.heard.append(("ended", request_id, output_len, now))

    def evicted(self, replica: str, prefix: Sequence[int]) -> None:
        self.heard.append(("evicted", replica, tuple(prefix)))


def listener(names: str = "a", block_size: int = 0) -> tuple[GlobalScheduler, Listener]:
    placement = Listener(block_size)
    scheduler = router(placement, names)
    placement.heard.clear()
    return scheduler, placement


def test_placement_hears_of_every_new_life_once() -> None:
    scheduler, placement = listener("")
    for incarnation in ("w1", "w1", "w2"):
        handle(scheduler, ReplicaUp("a", ready(incarnation)))
    handle(scheduler, ReplicaGone("a"))
    assert placement.heard == [("up", "a", 400), ("up", "a", 400), ("gone", "a")]


def test_placement_gets_hashes_of_all_known_tokens_if_it_wants_them() -> None:
    scheduler, placement = listener(block_size=4)
    scheduler.handle(RequestsArrived((request("r", prompt=6, resumed=3),)), 7.0)
    assert placement.heard == [("choose", "r", tuple(hash_blocks([1] * 6 + [2] * 3, 4)), 7.0)]
    scheduler, placement = listener(block_size=0)
    arrive(scheduler, request("r"))
    assert placement.heard == [("choose", "r", (), 0.0)]


def test_placement_hears_how_each_request_ends() -> None:
    scheduler, placement = listener()
    arrive(scheduler, *(request(f"r{i}") for i in range(5)))
    placement.heard.clear()
    ends = (
        FinishedSequence("r0", 0, SequenceStatus.FINISHED_STOPPED, 3),
        FinishedSequence("r1", 0, SequenceStatus.FINISHED_LENGTH, 10),
        FinishedSequence("r2", 0, SequenceStatus.FINISHED_ABORTED, 2),
        FinishedSequence("r3", 1, SequenceStatus.FINISHED_STOPPED, 2),
    )
    scheduler.handle(RequestsEnded(ends), 9.0)
    scheduler.handle(RequestsAborted((("r3", 0),)), 10.0)
    handle(scheduler, ReplicaUp("a", ready("w2")))
    told = [("r0", 3, 9.0), ("r1", 10, 9.0), ("r2", None, 9.0), ("r3", None, 10.0), ("r4", None, 0.0)]
    assert placement.heard == [*(("ended", *each) for each in told), ("up", "a", 400)], "before the new life begins"


def test_placement_hears_of_starts_of_current_attempts() -> None:
    scheduler, placement = listener()
    arrive(scheduler, request("r", attempt=1))
    placement.heard.clear()
    started = (StartedRequest("r", 0, 1, 0.1), StartedRequest("r", 1, 8, 0.5), StartedRequest("s", 0, 1, 0.1))
    assert scheduler.handle(RequestsStarted(started), 3.0) == []
    assert placement.heard == [("started", "r", 8, 0.5, 3.0)]


def test_notices_of_lives_that_are_over_are_dropped() -> None:
    scheduler, placement = listener()
    for replica, incarnation in (("a", "w0"), ("a", "w1"), ("unheard of", "w1")):
        assert handle(scheduler, PrefixesEvicted(replica, incarnation, ((1, 2), (3,)))) == []
    assert placement.heard == [("evicted", "a", (1, 2)), ("evicted", "a", (3,))]


def test_the_loads_are_one_object_while_the_same_replicas_take_requests() -> None:
    scheduler, placement = listener("ab")
    arrive(scheduler, request("r0"))
    arrive(scheduler, request("r1"))
    assert placement.loads[0] is placement.loads[1] is scheduler.loads()
    assert placement.loads[0][0].num_requests == 2, "and up to date"
    for event in (ReplicaAway("a"), ReplicaUp("a", ready()), ReplicaDraining("a"), ReplicaGone("b")):
        before = scheduler.loads()
        handle(scheduler, event)
        assert scheduler.loads() is not before


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


def test_requests_that_share_a_prefix_share_a_replica_under_e2() -> None:
    times = from_step_cost(StepCost(1e-3, 1e-4, 1e-4, 1e-8))
    scheduler = router(E2Router(times, 4), "abc")

    def tokens(first: int, tail: int) -> tuple[int, ...]:
        return (*range(first, first + 40), tail, tail, tail, tail)

    groups: dict[int, set[str]] = {100: set(), 200: set(), 300: set()}
    for i in range(30):
        first = 100 * (i % 3 + 1)
        (replica,) = arrive(scheduler, Request(f"r{i}", 0, "i", tokens(first, i), SamplingParams(10)))
        groups[first].add(replica)
        choice = scheduler.choice(f"r{i}")
        assert isinstance(choice, E2Choice)
        assert (choice.reason, choice.hit_len) == (("explore", 0) if i < 3 else ("exploit", 40))
        end(scheduler, f"r{i}")
    assert sorted(map(sorted, groups.values())) == [["a"], ["b"], ["c"]]
    handle(scheduler, ReplicaGone("b"))
    (replica,) = arrive(scheduler, Request("late", 0, "i", tokens(200, 99), SamplingParams(10)))
    assert replica != "b"
