"""What people are shown of placement: the busiest prefixes, loads, reasons."""

from __future__ import annotations

from core.config.placement import PlacementConfig
from core.messages.plans import WorkerReady
from core.request import Request, SamplingParams
from policies.fleet.events import ReplicaAway, ReplicaUp
from policies.fleet.scheduler import GlobalScheduler
from policies.placement.base import NUM_RECENT, Choice, PlacementStats, ReplicaLoad
from policies.placement.e2 import E2Router
from tests.unit.policies.e2_desk import LINEAR

LOADS = (ReplicaLoad("a", 0, 0.0), ReplicaLoad("b", 0, 0.0))
BLOCK = 16


def e2() -> E2Router:
    config = PlacementConfig(balance=False, rebalance=False, autoscale=False)
    router = E2Router(LINEAR, BLOCK, config)
    for load in LOADS:
        router.replica_up(load.name, 10_000)
    return router


def place(router: E2Router, number: int, path: tuple[int, ...]) -> str:
    return router.place(f"r{number}", path, len(path) * BLOCK + 1, LOADS, 0.0).replica


def test_busiest_prefixes_come_with_those_above_them() -> None:
    router = e2()
    shared = place(router, 0, (1, 2, 3))
    for number in range(1, 4):
        assert place(router, number, (1, 2, 3)) == shared
    place(router, 4, (1, 2, 9))
    other = place(router, 5, (7, 8))
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
