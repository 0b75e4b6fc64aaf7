"""Router, replicas and ingress replicas in one room, all of them mortal: every request is run to an end by somebody.

The GlobalScheduler is the real one; a replica is the set of attempts that its worker has, an ingress replica the
current attempt of each of its requests.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from core.messages.plans import FinishedSequence, WorkerReady
from core.messages.requests import Key, OpenRequest, Placed
from core.request import Request, SamplingParams, SequenceStatus
from policies.fleet.events import (
    AbortOnReplica,
    AskReplica,
    GlobalEvent,
    IngressAnnounced,
    KeysUnknown,
    PlaceRequests,
    ReplicaAway,
    ReplicaDraining,
    ReplicaGone,
    ReplicaUp,
    ReportLost,
    RequestsEnded,
)
from policies.fleet.scheduler import GlobalScheduler
from policies.placement.base import LeastWork
from policies.replica.events import RequestsAborted, RequestsArrived


@dataclass
class Replica:
    name: str
    life: int = 0
    up: bool = True
    attempts: dict[str, int] = field(default_factory=dict)

    @property
    def ready(self) -> WorkerReady:
        return WorkerReady(f"{self.name}-{self.life}", 100, 4, 400, False, 100)


@dataclass
class Stream:
    attempt: int = 0
    placed: Placed = field(default_factory=lambda: Placed("", 0, "", ""))


class House:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.replicas = {name: Replica(name) for name in "abc"}
        self.streams: dict[str, Stream] = {}
        self.num_lost = 0
        self.restart_router()

    def restart_router(self) -> None:
        self.router = GlobalScheduler(LeastWork())

    def handle(self, event: GlobalEvent, *, deliver: bool = True) -> None:
        """``deliver``: whether what the Router says reaches anybody."""
        instructions = self.router.handle(event, 0.0)
        self.router.check_integrity()
        for instruction in instructions if deliver else []:
            match instruction:
                case PlaceRequests(name, requests):
                    for request in requests:
                        have = self.replicas[name].attempts.get(request.request_id, -1)
                        self.replicas[name].attempts[request.request_id] = max(have, request.attempt)
                case AbortOnReplica(name, keys):
                    for request_id, attempt in keys:
                        if name in self.replicas and self.replicas[name].attempts.get(request_id, 1000) <= attempt:
                            del self.replicas[name].attempts[request_id]
                case AskReplica(name, keys):
                    attempts = self.replicas[name].attempts
                    self.handle(KeysUnknown(name, tuple(key for key in keys if attempts.get(key[0], -1) < key[1])))
                case ReportLost(_, keys):
                    self.lose(keys)

    def lose(self, keys: tuple[Key, ...]) -> None:
        for request_id, attempt in keys:
            stream = self.streams.get(request_id)
            if stream is not None and stream.attempt == attempt:
                self.num_lost += 1
                self.submit(request_id, attempt + 1)

    def submit(self, request_id: str, attempt: int, *, deliver: bool = True) -> None:
        stream = self.streams[request_id] = Stream(attempt)
        request = Request(request_id, attempt, "i", (1,) * 5, SamplingParams(10), tenant=request_id[-1])
        self.handle(RequestsArrived((request,)), deliver=deliver)
        if deliver:
            stream.placed = self.router.placed(request_id, attempt)

    def announce(self) -> None:
        streams = [
            OpenRequest(name, each.attempt, each.placed.replica, each.placed.worker_incarnation, 15)
            for name, each in self.streams.items()
        ]
        self.handle(IngressAnnounced("i", tuple(streams)))

    def say_state(self, replica: Replica) -> None:
        self.handle(ReplicaUp(replica.name, replica.ready) if replica.up else ReplicaAway(replica.name))

    def run(self, *, tell: bool) -> None:
        """A worker ends one of its requests; the client gets it if the attempt is the current one."""
        replica = self.rng.choice(list(self.replicas.values()))
        if replica.attempts:
            name = self.rng.choice(sorted(replica.attempts))
            attempt = replica.attempts.pop(name)
            if name in self.streams and self.streams[name].attempt == attempt:
                del self.streams[name]
            if tell:
                end = FinishedSequence(name, attempt, SequenceStatus.FINISHED_STOPPED, 10)
                self.handle(RequestsEnded((end,)))

    def lose_worker(self, replica: Replica) -> None:
        replica.life += 1
        replica.attempts.clear()


ACTIONS = ["submit"] * 6 + ["run"] * 4 + ["announce", "state", "away", "close", "blackhole"] * 2
ACTIONS += ["worker dies", "router dies", "run unheard"]


@pytest.mark.parametrize("seed", range(100))
def test_whoever_dies_every_request_is_run_to_its_end(seed: int) -> None:
    rng = random.Random(seed)
    house = House(rng)
    for i in range(150):
        replica = rng.choice(list(house.replicas.values()))
        match rng.choice(ACTIONS):
            case "submit":
                house.submit(f"r{i}", 0)
            case "blackhole":  # the Router dies with it in its hands
                house.submit(f"r{i}", 0, deliver=False)
                house.restart_router()
            case "run":
                house.run(tell=True)
            case "run unheard":
                house.run(tell=False)
            case "announce":
                house.announce()
            case "state":
                replica.up = True
                house.say_state(replica)
            case "away":
                replica.up = False
                house.say_state(replica)
            case "worker dies":
                house.lose_worker(replica)
            case "router dies":
                house.restart_router()
            case "close" if house.streams:
                name = rng.choice(sorted(house.streams))
                house.handle(RequestsAborted(((name, house.streams.pop(name).attempt),)))
    if rng.random() < 0.5:
        house.handle(ReplicaDraining("c"))
    for replica in house.replicas.values():
        replica.up = True
    for _ in range(60):
        for replica in house.replicas.values():
            house.say_state(replica)
        house.announce()
        for _ in range(20):
            house.run(tell=True)
    assert house.streams == {}
    house.announce()
    assert house.router.num_in_flight == 0


def test_what_ran_on_a_replica_that_is_given_up_runs_elsewhere() -> None:
    house = House(random.Random(1))
    for replica in house.replicas.values():
        house.say_state(replica)
    for i in range(9):
        house.submit(f"r{i}", 0)
    house.handle(ReplicaGone("a"))
    del house.replicas["a"]
    for _ in range(2):
        house.announce()
    assert house.num_lost == 3
    assert sorted(name for replica in house.replicas.values() for name in replica.attempts) == sorted(house.streams)
