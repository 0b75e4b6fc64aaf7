"""The scheduler over replicas: what a placement hears, and what people are shown of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from farsight.core.config.scheduling import PlacementConfig
from farsight.core.costs import A100_7B, StepCost
from farsight.core.forecast import QUANTILES, Forecast, ForecastMade
from farsight.core.messages.plans import FinishedSequence, KVCacheEvent, StartedRequest, WorkerReady
from farsight.core.request import Request, SamplingParams, SequenceStatus
from farsight.policies.fleet.events import (
    AskCache,
    GlobalEvent,
    KVCacheChanged,
    PlaceRequests,
    ReplicaAway,
    ReplicaDraining,
    ReplicaGone,
    ReplicaUp,
    RequestsEnded,
    RequestsStarted,
    StepsPriced,
)
from farsight.policies.fleet.scheduler import GlobalScheduler
from farsight.policies.placement.base import NUM_RECENT, Choice, LeastWork, Placement, PlacementStats, ReplicaLoad
from farsight.policies.placement.e2 import E2Router
from farsight.policies.replica.events import ForecastsArrived, RequestsAborted, RequestsArrived
from tests.unit.policies.e2_driver import LINEAR
from tests.unit.policies.global_table import arrive, handle, ready, request, router


class Listener(Placement):
    """Places in turn and writes down what it hears."""

    def __init__(self, block_size: int = 0) -> None:
        self.block_size = block_size
        self.heard: list[tuple[object, ...]] = []
        self.loads: list[tuple[ReplicaLoad, ...]] = []

    def choose(self, request: Request, prefix: Sequence[int], loads: tuple[ReplicaLoad, ...], now: float) -> Choice:
        self.heard.append(("choose", request.request_id, tuple(prefix), now))
        self.loads.append(loads)
        return Choice(loads[0].name, "first", 4 * len(prefix), 4 * bool(prefix))

    def replica_up(self, name: str, capacity: int) -> None:
        self.heard.append(("up", name, capacity))

    def replica_gone(self, name: str) -> None:
        self.heard.append(("gone", name))

    def started(self, request_id: str, cached_len: int, queue_s: float, now: float) -> None:
        self.heard.append(("started", request_id, cached_len, queue_s, now))

    def ended(self, request_id: str, output_len: int | None, now: float) -> None:
        self.heard.append(("ended", request_id, output_len, now))

    def foreseen(self, request_id: str, forecast: Forecast, now: float) -> None:
        self.heard.append(("foreseen", request_id, forecast.mean, now))

    def noticed(self, replica: str, notice: KVCacheEvent) -> None:
        self.heard.append(("noticed", replica, notice.seq))

    def priced(self, replica: str, cost: StepCost) -> None:
        self.heard.append(("priced", replica, cost))


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


def test_placement_gets_the_hashes_that_a_request_came_with_and_the_replica_what_it_should_find() -> None:
    scheduler, placement = listener(block_size=4)
    both = replace(request("r", prompt=9), prefix_hashes=(5, 6)), request("s", prompt=9)
    (placed,) = handle(scheduler, RequestsArrived(both))
    assert placement.heard == [("choose", "r", (5, 6), 0.0), ("choose", "s", (), 0.0)]
    assert isinstance(placed, PlaceRequests)
    assert [each.expected_cached_len for each in placed.requests] == [4, 0], "of two blocks one is still computed"


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


def foreseen(name: str, attempt: int, mean: float) -> ForecastMade:
    return ForecastMade(name, attempt, Forecast(mean, (mean,) * len(QUANTILES), 5, "test", 1))


def test_placement_hears_of_forecasts_starts_and_prices_of_what_is_here() -> None:
    scheduler, placement = listener()
    arrive(scheduler, request("r", attempt=1))
    placement.heard.clear()
    made = (foreseen("r", 0, 10.0), foreseen("r", 1, 20.0), foreseen("s", 0, 30.0))
    started = (StartedRequest("r", 0, 1, 0.1), StartedRequest("r", 1, 8, 0.5), StartedRequest("s", 0, 1, 0.1))
    events: list[GlobalEvent] = [StepsPriced(name, A100_7B) for name in ("a", "unheard of")]
    for event in (ForecastsArrived(made), RequestsStarted(started), *events):
        assert scheduler.handle(event, 3.0) == []
    assert placement.heard == [("foreseen", "r", 20.0, 3.0), ("started", "r", 8, 0.5, 3.0), ("priced", "a", A100_7B)]


def test_of_two_attempts_in_one_message_only_the_later_one_is_queued() -> None:
    scheduler = GlobalScheduler(LeastWork())
    arrive(scheduler, request("r"), request("s"), request("r", attempt=1), request("r"))
    placed = scheduler.handle(ReplicaUp("a", ready()), 1.0)
    (found,) = [each for each in placed if isinstance(each, PlaceRequests)]
    assert [(each.request_id, each.attempt) for each in found.requests] == [("r", 1), ("s", 0)]


def noticed(*seqs: int, whole: int = 0, incarnation: str = "w1", replica: str = "a") -> KVCacheChanged:
    return KVCacheChanged(replica, incarnation, tuple(KVCacheEvent(seq, seq == whole) for seq in seqs))


def test_a_new_life_is_asked_what_it_caches_where_placement_looks_at_that() -> None:
    for block_size, asks in ((4, [AskCache("a")]), (8, []), (0, [])):
        scheduler = GlobalScheduler(Listener(block_size))
        assert handle(scheduler, ReplicaUp("a", ready())) == asks
        assert handle(scheduler, ReplicaUp("a", ready("w2"))) == asks, "whatever the life before it was asked"


def test_who_does_not_answer_is_asked_again_but_not_at_once() -> None:
    scheduler, _ = listener(block_size=4)
    assert scheduler.handle(ReplicaUp("a", ready()), 0.5) == []
    assert scheduler.handle(ReplicaUp("a", ready()), 1.0) == [AskCache("a")]
    scheduler.handle(noticed(3, whole=3), 1.1)
    assert scheduler.handle(ReplicaUp("a", ready()), 5.0) == [], "it has answered"


def test_notices_are_taken_once_and_in_order_and_a_gap_asks_for_all() -> None:
    scheduler, placement = listener(block_size=4)
    scheduler.handle(noticed(1, 2), 0.0)
    assert placement.heard == [], "nothing before the whole"
    scheduler.handle(noticed(2, whole=2), 0.0)
    scheduler.handle(noticed(1, 2, 3, 3), 0.0)
    assert placement.heard == [("noticed", "a", 2), ("noticed", "a", 3)]
    assert scheduler.handle(noticed(5), 2.0) == [AskCache("a")]
    assert scheduler.handle(noticed(6), 2.5) == []
    scheduler.handle(noticed(6, 7, whole=6), 2.6)
    assert placement.heard[2:] == [("noticed", "a", 6), ("noticed", "a", 7)]
    scheduler.handle(noticed(5, whole=5), 2.7)
    assert len(placement.heard) == 4, "news have overtaken that answer"


def test_notices_of_lives_that_are_over_are_dropped() -> None:
    scheduler, placement = listener(block_size=4)
    for replica, incarnation in (("a", "w0"), ("unheard of", "w1")):
        assert handle(scheduler, noticed(1, whole=1, incarnation=incarnation, replica=replica)) == []
    assert placement.heard == []


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


BOTH = (ReplicaLoad("a", 0, 0.0), ReplicaLoad("b", 0, 0.0))
BLOCK = 16


def e2() -> E2Router:
    config = PlacementConfig(balance=False, rebalance=False, autoscale=False)
    router = E2Router(LINEAR, BLOCK, config)
    for load in BOTH:
        router.replica_up(load.name, 10_000)
    return router


def put(router: E2Router, number: int, path: tuple[int, ...]) -> str:
    return router.place(f"r{number}", path, len(path) * BLOCK + 1, BOTH, 0.0).replica


def test_busiest_prefixes_come_with_those_above_them() -> None:
    router = e2()
    shared = put(router, 0, (1, 2, 3))
    for number in range(1, 4):
        assert put(router, number, (1, 2, 3)) == shared
    put(router, 4, (1, 2, 9))
    other = put(router, 5, (7, 8))
    assert other != shared
    router.ended("r5", 10, 0.0)
    views = router.busiest_prefixes(10)
    found = [(view.depth, view.num_tokens, view.end_len, view.num_recent, view.num_in_flight) for view in views]
    assert found == [(0, 32, 32, 5, 5), (1, 16, 48, 4, 4), (1, 16, 48, 1, 1), (0, 32, 32, 1, 0)]
    assert [view.replicas for view in views] == [(shared,), (shared,), (shared,), (other,)]
    assert [view.end_len for view in router.busiest_prefixes(2)] == [32, 48]
    assert router.busiest_prefixes(0) == ()


def test_a_replica_is_shown_with_what_placement_knows() -> None:
    machine = GlobalScheduler(e2())
    machine.handle(ReplicaUp("a", WorkerReady("w", 100, BLOCK, 1600, False, 500)), 0.0)
    (view,) = machine.replica_views()
    assert (view.replica, view.takes_requests, view.cached_tokens, view.capacity_tokens) == ("a", True, 0, 1600)
    machine.handle(ReplicaAway("a"), 1.0)
    (view,) = machine.replica_views()
    assert not view.takes_requests


def test_notes_count_all_and_keep_the_last() -> None:
    notes = PlacementStats()
    request = Request("r", 0, "i", (1, 2, 3), SamplingParams(1))
    for number in range(NUM_RECENT + 5):
        notes.add(request, Choice(str(number), "even" if number % 2 == 0 else "odd"), float(number))
    assert [(each.reason, each.count) for each in notes.reasons()] == [("even", 13), ("odd", 12)]
    recent = notes.recent()
    assert len(recent) == NUM_RECENT
    assert (recent[0].replica, recent[0].known_len, recent[0].placed_at) == ("24", 3, 24.0)
