"""Placement in batch mode: one central queue, and replicas that pull when they have nothing to do."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from farsight.core.config.scheduling import BatchConfig
from farsight.core.forecast import ForecastMade
from farsight.core.messages.plans import FinishedSequence, WorkerReady
from farsight.core.messages.requests import Key, OpenRequest
from farsight.core.request import Request, SamplingParams, SequenceStatus
from farsight.policies.compose import build_batch_scheduler
from farsight.policies.fleet.batch_scheduler import BatchScheduler
from farsight.policies.fleet.events import (
    AbortOnReplica,
    AskReplica,
    BatchEnded,
    GlobalEvent,
    GlobalInstruction,
    HistoryLearned,
    IngressLost,
    KeysUnknown,
    PlaceRequests,
    ReplicaAway,
    ReplicaBroke,
    ReplicaDraining,
    ReplicaGone,
    ReplicaRests,
    ReplicaUp,
    ReportLost,
    RequestsEnded,
    TimePassed,
)
from farsight.policies.presets import PRESETS
from farsight.policies.replica.events import ForecastsArrived, RefuseRequest, RequestsAborted, RequestsArrived
from farsight.policies.settings import BatchSettings
from tests.unit.policies.batch_jobs import seeds
from tests.unit.policies.global_table import announcement, forecast, request, stream

BATCH_PRESETS = [name for name, preset in PRESETS.items() if preset.mode == "batch"]


def placed(instructions: Iterable[GlobalInstruction]) -> list[tuple[str, list[str]]]:
    found = [each for each in instructions if isinstance(each, PlaceRequests)]
    return [(each.replica, [one.request_id for one in each.requests]) for each in found]


def ready(incarnation: str = "w1", num_blocks: int = 100, max_model_len: int = 400) -> WorkerReady:
    return WorkerReady(incarnation, num_blocks, 4, max_model_len, False, 100)


class House:
    """A machine, and what it has placed where."""

    def __init__(self, preset: str = "magnus-vs", replicas: str = "a", wait_s: float = 0.0, **settings: Any) -> None:
        own: dict[str, Any] = {"edges": None if "num_bins" in settings else (0.0, math.inf), "memory_tokens": math.inf}
        own |= {name: settings.pop(name) for name in ("memory_tokens", "edges", "max_num_seqs") if name in settings}
        own["batch"] = BatchConfig(**({"max_wait_s": math.inf} | settings))
        served = BatchSettings(serving_time_s=lambda size, prompt, output: 0.5 * output, **own)
        self.machine: BatchScheduler = build_batch_scheduler(preset, served, wait_s)
        self.now = 0.0
        for name in replicas:
            self.tell(ReplicaUp(name, ready()))

    def tell(self, event: GlobalEvent) -> list[GlobalInstruction]:
        instructions = self.machine.handle(event, self.now)
        self.machine.check_integrity()
        return instructions

    def arrive(self, *requests: Request) -> list[tuple[str, list[str]]]:
        return placed(self.tell(RequestsArrived(requests)))

    def end(self, *keys: Key, output_len: int = 3) -> list[GlobalInstruction]:
        stopped = SequenceStatus.FINISHED_STOPPED
        return self.tell(RequestsEnded(tuple(FinishedSequence(*key, stopped, output_len) for key in keys)))

    def announce(self, *streams: OpenRequest, ingress: str = "i") -> list[GlobalInstruction]:
        return self.tell(announcement(*streams, ingress=ingress))


def test_what_comes_waits_until_a_replica_has_nothing_to_do() -> None:
    house = House(batch_size=2)
    assert house.arrive(request("x")) == [("a", ["x"])]
    assert house.arrive(request("r1"), request("r2"), request("r3")) == []
    assert house.machine.num_waiting == 3
    assert placed(house.end(("x", 0))) == [("a", ["r1", "r2"])]
    assert placed(house.end(("r1", 0))) == [], "the batch runs to its end"
    assert placed(house.end(("r2", 0))) == [("a", ["r3"])]


def test_every_idle_replica_gets_a_batch_of_its_own() -> None:
    house = House(replicas="ab", batch_size=2)
    assert house.arrive(*(request(f"r{i}") for i in range(5))) == [("a", ["r0", "r1"]), ("b", ["r2", "r3"])]
    house.tell(ReplicaDraining("a"))
    assert placed(house.end(("r0", 0), ("r1", 0))) == [], "what drains pulls no more"
    assert house.tell(ReplicaAway("b")) == []
    assert placed(house.tell(ReplicaUp("c", ready("w3")))) == [("c", ["r4"])]


def test_a_batch_that_has_ended_is_told_with_what_was_expected() -> None:
    house = House("magnus")
    house.arrive(request("first"))
    house.arrive(request("r1", prompt=7, out=20), request("r2", prompt=9, out=12, resumed=2))
    house.end(("first", 0))
    house.now = 4.0
    house.end(("r1", 0), output_len=6)
    instructions = house.end(("r2", 0), output_len=12)
    assert instructions == [BatchEnded("a", 1, 2, 11, 10, 20, 10.0, 4.0)], "two tokens of r2 were there before"


def test_a_batch_that_somebody_has_left_teaches_nothing() -> None:
    house = House()
    house.arrive(request("r1"), request("r2"))
    assert house.tell(RequestsAborted((("r1", 0),))) == [AbortOnReplica("a", (("r1", 0),))]
    assert house.end(("r2", 0)) == []


def test_what_an_ingress_that_is_lost_had_waiting_goes_with_it() -> None:
    house = House()
    house.arrive(request("x"))
    house.arrive(request("r1"))
    assert house.tell(IngressLost("i")) == [AbortOnReplica("a", (("x", 0),))]
    assert house.machine.num_in_flight == 0


def test_a_forecast_is_waited_for_but_not_for_long() -> None:
    house = House("magnus", wait_s=0.05)
    assert house.arrive(request("r1"), request("r2")) == []
    assert house.machine.next_due_at == 0.05
    house.now = 0.02
    made = (
        ForecastMade("r1", 0, forecast(4.0)),
        ForecastMade("r2", 7, forecast(5.0)),
        ForecastMade("no", 0, forecast(1)),
    )
    (place,) = house.tell(ForecastsArrived(made))
    assert isinstance(place, PlaceRequests)
    assert [each.forecast for each in place.requests] == [forecast(4.0)]
    house.end(("r1", 0))
    house.now = 0.05
    assert placed(house.tell(TimePassed())) == [("a", ["r2"])]
    assert house.machine.next_due_at is None


@pytest.mark.parametrize("preset", ["magnus", "magnus-abp", "multi-bin"])
def test_forecasts_that_come_late_make_the_batches_that_they_would_have_made_in_time(preset: str) -> None:
    lens = [4, 14, 40, 14, 4, 40, 40, 4, 14, 14, 40, 4]
    names = [f"r{index}" for index in range(len(lens))]
    batches = []
    for late in (False, True):
        house = House(preset, batch_size=4, wma_threshold=150, edges=(0.0, 8.0, 20.0, math.inf), max_wait_s=9)
        house.tell(HistoryLearned(forecast(20.0)))
        house.arrive(*(request(f"x{index}", out=20) for index in range(4)))
        house.now = 9.0
        house.tell(TimePassed())
        sent = [request(name, out=100) for name in names]
        if not late:
            sent = [replace(each, forecast=forecast(mean)) for each, mean in zip(sent, lens, strict=True)]
        assert house.arrive(*sent) == [], "the replica is busy"
        house.now = 17.0
        if late:
            made = [ForecastMade(name, 0, forecast(mean)) for name, mean in zip(names, lens, strict=True)]
            assert house.tell(ForecastsArrived(tuple(made))) == []
        house.now = 18.0
        running = [f"x{index}" for index in range(4)]
        seen: list[list[str]] = []
        while running:
            instructions = house.end(*((name, 0) for name in running))
            running = [name for _, batch in placed(instructions) for name in batch]
            seen += [running] if running else []
        assert sorted(name for batch in seen for name in batch) == sorted(names)
        batches.append(seen)
    assert batches[0] == batches[1]
    of = dict(zip(names, lens, strict=True))
    assert all(len({of[name] for name in batch}) == 1 for batch in batches[1]), "no batch mixes lengths"


def test_a_late_forecast_changes_the_response_ratio_of_its_batch() -> None:
    """Which batch of two has the turn, of equal age: the one that is short by its forecast."""
    house = House("magnus", wma_threshold=0)
    house.arrive(request("x", out=9))
    house.arrive(request("long", out=30), request("short", out=40))
    house.tell(ForecastsArrived((ForecastMade("short", 0, forecast(2.0)),)))
    house.now = 60.0
    assert placed(house.end(("x", 0))) == [("a", ["short"])]
    told = house.machine.choice("short")
    assert told is not None
    facts = told.facts()
    assert (facts["counted_tokens"], facts["counted_by"], facts["service_s"]) == (2, "test", 1.0)
    house.tell(ForecastsArrived((ForecastMade("short", 0, forecast(33.0)),)))
    told = house.machine.choice("short")
    assert told is not None
    assert told.facts()["counted_tokens"] == 2, "a forecast behind the decision does not stand beside it"


def test_a_request_that_brings_its_forecast_or_comes_back_does_not_wait() -> None:
    house = House(wait_s=0.05)
    foreseen = Request("f", 0, "i", (1,), SamplingParams(9), forecast=forecast(3.0))
    assert house.arrive(foreseen, request("again", attempt=1)) == [("a", ["f", "again"])]


def test_without_a_forecast_the_lengths_of_the_past_count() -> None:
    house = House("magnus", replicas="")
    house.tell(HistoryLearned(forecast(3.2)))
    house.arrive(request("r1", out=100))
    house.tell(ReplicaUp("a", ready()))
    (ended,) = house.end(("r1", 0))
    assert isinstance(ended, BatchEnded)
    assert ended.predicted_len == 4


def test_a_bin_that_waits_for_company_is_due_while_somebody_is_idle() -> None:
    house = House("multi-bin", max_wait_s=1.0)
    assert house.arrive(request("r1")) == []
    assert house.machine.next_due_at == 1.0
    house.now = 1.0
    assert placed(house.tell(TimePassed())) == [("a", ["r1"])]
    house.arrive(request("r2"))
    assert house.machine.next_due_at is None, "no replica could run it"


def test_memory_of_the_smallest_worker_bounds_the_batches() -> None:
    house = House("magnus", replicas="")
    house.arrive(*(request(f"r{i}") for i in range(4)))
    assert placed(house.tell(ReplicaUp("a", ready(num_blocks=10)))) == [("a", ["r0", "r1"])], "40 tokens, 20 each"


def test_what_fits_no_worker_is_refused_and_what_fits_another_one_stays() -> None:
    house = House(replicas="")
    house.arrive(request("huge", out=1000), request("large", out=350), request("small"))
    refused = house.tell(ReplicaUp("a", ready(max_model_len=100)))
    assert [each.request_id for each in refused if isinstance(each, RefuseRequest)] == ["huge", "large"]
    assert placed(refused) == [("a", ["small"])]
    house.tell(ReplicaUp("b", ready(max_model_len=400)))
    house.tell(ReplicaAway("b"))
    house.arrive(request("large2", out=350), request("small2"))
    assert placed(house.end(("small", 0))) == [("a", ["small2"])]
    assert placed(house.tell(ReplicaUp("b", ready(max_model_len=400)))) == [("b", ["large2"])]


def broken_house(*names: str, **settings: object) -> House:
    """They ran in one batch on replica a, which broke off."""
    house = House(batch_size=8, **settings)  # type: ignore[arg-type]
    house.arrive(*map(request, names))
    assert house.tell(ReplicaBroke("a", tuple((name, 0) for name in names))) == []
    return house


def test_a_broken_batch_comes_back_in_halves_that_nobody_joins() -> None:
    house = broken_house("r1", "r2", "r3")
    assert house.machine.num_splits == 1
    streams = [stream(name) for name in ("r1", "r2", "r3")]
    assert house.announce(*streams) == [ReportLost("i", (("r1", 0), ("r2", 0), ("r3", 0)))]
    assert house.announce(*streams) == [ReportLost("i", (("r1", 0), ("r2", 0), ("r3", 0)))], "until they are back"
    assert house.arrive(request("r2", attempt=1, resumed=4), request("r1", attempt=1, resumed=4)) == [], (
        "the third may come yet"
    )
    assert house.arrive(request("new")) == [("a", ["new"])]
    assert house.arrive(request("r3", attempt=1, resumed=4)) == []
    assert placed(house.end(("new", 0))) == [("a", ["r1", "r2"])], "in their old order"
    assert placed(house.end(("r1", 1), ("r2", 1))) == [("a", ["r3"])]


def test_what_is_said_twice_of_a_broken_batch_is_heard_once() -> None:
    house = broken_house("r1", "r2")
    house.tell(ReplicaBroke("a", (("r1", 0), ("r2", 0))))
    assert house.machine.num_splits == 1
    assert house.arrive(request("r1")) == [], "a late delivery of the attempt that broke off"
    assert house.arrive(request("r1", attempt=1), request("r2", attempt=1)) == [("a", ["r1"])]
    house.tell(ReplicaBroke("a", (("r1", 0), ("r2", 0))))
    assert house.machine.num_splits == 1


def test_a_replica_takes_nothing_while_it_reloads() -> None:
    house = broken_house("r1", "r2", reload_s=5.0)
    house.now = 1.0
    assert house.machine.next_due_at is None, "nothing waits"
    assert house.arrive(request("r1", attempt=1), request("r2", attempt=1)) == []
    house.tell(ReplicaBroke("a", (("r1", 0), ("r2", 0))))
    assert house.machine.next_due_at == 5.0, "what is said twice of a batch begins no second reload"
    house.now = 5.0
    assert placed(house.tell(TimePassed())) == [("a", ["r1"])]
    assert house.machine.next_due_at is None


def test_a_replica_that_died_has_loaded_its_model_when_it_is_back() -> None:
    house = broken_house("r1", "r2", reload_s=5.0)
    house.tell(ReplicaAway("a"))
    assert house.arrive(request("r1", attempt=1), request("r2", attempt=1)) == []
    assert placed(house.tell(ReplicaUp("a", ready("w2")))) == [("a", ["r1"])]


@pytest.mark.parametrize("gone", ["abort", "closed", "lost"])
def test_who_leaves_a_broken_batch_is_not_waited_for(gone: str) -> None:
    house = broken_house("r1", "r2", "r3")
    assert house.arrive(request("r1", attempt=1), request("r2", attempt=1)) == []
    match gone:
        case "abort":
            instructions = house.tell(RequestsAborted((("r3", 0),)))
        case "closed":
            instructions = house.announce(stream("r1", 1, ""), stream("r2", 1, ""))
        case _:
            assert placed(house.tell(IngressLost("i"))) == []
            assert house.machine.num_in_flight == 0
            return
    assert placed(instructions) == [("a", ["r1"])]


def test_what_is_left_of_a_broken_batch_goes_as_it_is_if_it_is_one() -> None:
    house = broken_house("r1", "r2")
    house.tell(RequestsAborted((("r2", 0),)))
    assert house.arrive(request("r1", attempt=1)) == [("a", ["r1"])]


def test_a_request_that_runs_out_of_memory_alone_is_refused() -> None:
    house = broken_house("r1")
    (refused,) = house.tell(RequestsArrived((request("r1", attempt=1),)))
    assert isinstance(refused, RefuseRequest)
    assert (refused.request_id, refused.attempt) == ("r1", 1)
    assert house.machine.num_in_flight == 0


def test_a_successor_adopts_what_runs_and_its_replica_is_busy() -> None:
    house = House(replicas="")
    assert house.announce(stream("old")) == []
    assert house.tell(ReplicaUp("a", ready())) == []
    assert house.arrive(request("new")) == []
    assert house.announce(stream("old"), stream("new", 0, "")) == [AskReplica("a", (("old", 0),))]
    assert house.tell(ReplicaBroke("a", (("old", 0), ("unknown", 0)))) != [], "nothing is in flight there any more"
    assert house.machine.placed("new", 0).replica == "a"


def test_a_replica_whose_clients_do_not_read_pulls_on() -> None:
    house = House()
    house.arrive(request("slow1"), request("slow2"))
    house.arrive(request("r1"))
    assert house.tell(ReplicaRests("a", (("slow1", 0),))) == []
    assert placed(house.tell(ReplicaRests("a", (("slow1", 0), ("slow2", 0))))) == [("a", ["r1"])]
    assert house.arrive(request("r2")) == [], "r1 runs, whatever an old message says"
    assert placed(house.end(("r1", 0))) == [("a", ["r2"])]


def test_what_a_replica_does_not_know_is_lost_and_makes_it_idle() -> None:
    house = House()
    house.arrive(request("r1"))
    house.arrive(request("r2"))
    lost, place = house.tell(KeysUnknown("a", (("r1", 0),)))
    assert lost == ReportLost("i", (("r1", 0),))
    assert placed([place]) == [("a", ["r2"])]
    house.tell(ReplicaGone("a"))
    assert house.machine.num_in_flight == 0


@pytest.mark.parametrize("preset", BATCH_PRESETS)
@pytest.mark.parametrize("seed", seeds(2, nightly=6))
def test_whatever_happens_a_replica_has_one_batch_and_everybody_ends(preset: str, seed: int) -> None:
    """Against a model that knows only who is where: no request is placed twice, lost, or put beside a running batch."""
    rng = random.Random(f"{preset} {seed}")
    house = House(preset, "ab", rng.choice([0.0, 0.05]), max_wait_s=0.2, max_num_seqs=6, num_bins=rng.randint(1, 3))
    attempts: dict[str, int] = {}
    running: dict[str, set[str]] = {"a": set(), "b": set()}
    lost: set[str] = set()
    num_done = 0

    def take(instructions: list[GlobalInstruction]) -> None:
        for each in instructions:
            if isinstance(each, PlaceRequests):
                assert not running[each.replica], "beside a batch that runs"
                assert len(each.requests) <= 6
                for one in each.requests:
                    assert attempts[one.request_id] == one.attempt
                    assert not any(one.request_id in names for names in running.values())
                    running[each.replica].add(one.request_id)
            elif isinstance(each, ReportLost):
                lost.update(name for name, _ in each.keys)

    for number in range(500):
        house.now += rng.expovariate(20)
        busy = [name for name in running if running[name]]
        match rng.choice(["come", "come", "end", "end", "break", "leave", "time", "back", "foresee"]):
            case "come":
                attempts[f"r{number}"] = 0
                take(house.tell(RequestsArrived((request(f"r{number}", out=rng.randint(1, 60)),))))
            case "end" if busy:
                name = rng.choice(busy)
                ended = rng.choice(sorted(running[name]))
                running[name].remove(ended)
                num_done += 1
                take(house.end((ended, attempts.pop(ended))))
            case "break" if busy and len(running[name := rng.choice(busy)]) > 1:
                broken, running[name] = sorted(running[name]), set()
                lost.update(broken)
                take(house.tell(ReplicaBroke(name, tuple((each, attempts[each]) for each in broken))))
            case "back" if lost:
                back = rng.choice(sorted(lost))
                lost.remove(back)
                attempts[back] += 1
                take(house.tell(RequestsArrived((request(back, attempt=attempts[back], resumed=1, out=60),))))
            case "leave" if attempts:
                left = rng.choice(sorted(attempts))
                for names in (*running.values(), lost):
                    names.discard(left)
                num_done += 1
                take(house.tell(RequestsAborted(((left, attempts.pop(left)),))))
            case "foresee" if attempts:
                seen = rng.choice(sorted(attempts))
                take(house.tell(ForecastsArrived((ForecastMade(seen, attempts[seen], forecast(rng.randint(1, 60))),))))
            case _:
                take(house.tell(TimePassed()))
    for _ in range(2000):
        if not attempts:
            break
        house.now += 0.1
        for back in sorted(lost):
            lost.remove(back)
            attempts[back] += 1
            take(house.tell(RequestsArrived((request(back, attempt=attempts[back], resumed=1, out=60),))))
        for name in running:
            for ended in sorted(running[name]):
                running[name].remove(ended)
                take(house.end((ended, attempts.pop(ended))))
        take(house.tell(TimePassed()))
    assert not attempts
    assert house.machine.num_in_flight == 0
    assert num_done > 50
