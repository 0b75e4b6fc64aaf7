"""Placement over replicas: events in, instructions out."""

from __future__ import annotations

import random

import pytest

from core.errors import ConfigError
from core.request import Request, SamplingParams
from policies.global_scheduler import (
    AbortOnReplica,
    GlobalInstruction,
    GlobalScheduler,
    PlaceRequests,
    ReplicaConnected,
    RequestLeft,
)
from policies.least_work import LeastWork
from policies.placement import Placement, ReplicaLoad
from policies.presets import build_router
from policies.replica_scheduler import RefuseRequest, RequestsAborted, RequestsArrived
from policies.round_robin import RoundRobin


def request(name: str, prompt: int = 10, out: int = 10, attempt: int = 0) -> Request:
    return Request(name, attempt, "i", (1,) * prompt, SamplingParams(out))


def router(placement: Placement | None = None, replicas: str = "ab") -> GlobalScheduler:
    scheduler = GlobalScheduler(placement or LeastWork())
    for name in replicas:
        scheduler.handle(ReplicaConnected(name), 0.0)
    return scheduler


def arrive(scheduler: GlobalScheduler, *requests: Request) -> dict[str, list[str]]:
    """{replica: ids placed there}"""
    placed: dict[str, list[str]] = {}
    for instruction in scheduler.handle(RequestsArrived(requests), 0.0):
        assert isinstance(instruction, PlaceRequests)
        placed[instruction.replica] = [each.request_id for each in instruction.requests]
    scheduler.check_integrity()
    return placed


def test_round_robin_takes_turns() -> None:
    loads = [ReplicaLoad(name, 0, 0.0) for name in "abc"]
    policy = RoundRobin()
    assert [policy.choose(request("r"), loads) for _ in range(5)] == ["a", "b", "c", "a", "b"]


def test_least_work_counts_tokens_not_requests() -> None:
    loads = [ReplicaLoad("a", 1, 500.0), ReplicaLoad("b", 4, 80.0), ReplicaLoad("c", 2, 80.0)]
    assert LeastWork().choose(request("r"), loads) == "b", "of equals the first"


def test_work_counts_from_placement_to_the_end() -> None:
    scheduler = router()
    assert arrive(scheduler, request("long", prompt=100), request("r1"), request("r2")) == {
        "a": ["long"],
        "b": ["r1", "r2"],
    }
    assert [load.work_tokens for load in scheduler.loads()] == [110, 40]
    scheduler.handle(RequestLeft("long", 0, 3), 0.0)
    assert [load.work_tokens for load in scheduler.loads()] == [0, 40]
    assert arrive(scheduler, request("r3")) == {"a": ["r3"]}


def test_expected_output_is_the_mean_of_what_ended_but_never_more_than_asked_for() -> None:
    scheduler = router(replicas="a")
    arrive(scheduler, request("r0", prompt=1, out=1000))
    scheduler.handle(RequestLeft("r0", 0, 50), 0.0)
    arrive(scheduler, request("r1", prompt=1, out=1000), request("r2", prompt=1, out=5))
    assert scheduler.loads()[0].work_tokens == (1 + 50) + (1 + 5)


def test_a_request_that_never_ran_teaches_nothing() -> None:
    scheduler = router(replicas="a")
    arrive(scheduler, request("r0"))
    scheduler.handle(RequestLeft("r0", 0, None), 0.0)
    arrive(scheduler, request("r1", prompt=1, out=1000))
    assert scheduler.loads()[0].work_tokens == 1001


def test_aborts_go_where_their_request_is() -> None:
    scheduler = router(RoundRobin())
    arrive(scheduler, *(request(f"r{i}") for i in range(4)))
    keys = (("r0", 0), ("r1", 0), ("r2", 0), ("unknown", 0))
    instructions: list[GlobalInstruction] = scheduler.handle(RequestsAborted(keys), 0.0)
    assert instructions == [AbortOnReplica("a", (("r0", 0), ("r2", 0))), AbortOnReplica("b", (("r1", 0),))]
    assert scheduler.num_in_flight == 1


def test_duplicates_and_older_attempts_change_nothing() -> None:
    scheduler = router(RoundRobin())
    arrive(scheduler, request("r", attempt=1))
    assert arrive(scheduler, request("r", attempt=1)) == {}
    assert scheduler.handle(RequestsAborted((("r", 0),)), 0.0) == []
    scheduler.handle(RequestLeft("r", 0, 5), 0.0)
    assert scheduler.num_in_flight == 1
    assert arrive(scheduler, request("r", attempt=2)) == {"b": ["r"]}
    assert scheduler.num_in_flight == 1


def test_without_a_replica_requests_are_refused_not_kept() -> None:
    scheduler = router(replicas="")
    assert scheduler.handle(RequestsArrived((request("r"),)), 0.0) == [
        RefuseRequest("r", 0, "model", "no replica is ready yet")
    ]


@pytest.mark.parametrize("seed", range(5))
def test_random_lives_leave_nothing_in_the_table(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = router(LeastWork(), "abc")
    alive: set[str] = set()
    for i in range(300):
        arrive(scheduler, request(f"r{i}", prompt=rng.randint(1, 500), out=rng.randint(1, 500)))
        alive.add(f"r{i}")
        for name in rng.sample(sorted(alive), k=min(len(alive), rng.randint(0, 2))):
            alive.discard(name)
            event = RequestLeft(name, 0, rng.randint(1, 100)) if rng.random() < 0.5 else RequestsAborted(((name, 0),))
            scheduler.handle(event, 0.0)
            scheduler.check_integrity()
    assert scheduler.num_in_flight == len(alive)


def test_the_preset_names_the_placement_and_the_setting_overrides_it() -> None:
    build_router("fcfs").check_integrity()
    build_router("fcfs", "least-work").check_integrity()
    with pytest.raises(ConfigError, match=r"scheduler\.placement.*round-robin, least-work"):
        build_router("fcfs", "random")
