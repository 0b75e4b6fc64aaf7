"""What goes wrong in a world, and when: drawn from its seed before it begins."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.protocol.world import BUSY_S, World

READY_S = 0.5
"""When every replica is up, whatever the network."""


def plan_faults(world: World) -> None:
    """Fills the calendar of a world: clients, kills, hangs, broken connections."""
    rng = world.rng
    world.calm = rng.random() < 0.15
    for _ in range(rng.randint(6, 12)):
        ingress_name = rng.choice(world.ingress_names)
        world.clock.at(rng.uniform(READY_S if world.calm else 0, BUSY_S), lambda name=ingress_name: world.open(name))  # type: ignore[misc]
    _some(world, rng.choice([0, 0, 1, 3]), world.leave)
    for _ in range(rng.choice([0, 0, 1, 2])):
        duration_s = rng.uniform(0.1, 2.5) if rng.random() < 0.9 else 30.0
        _some(world, 1, lambda duration_s=duration_s: world.slow_down(duration_s))  # type: ignore[misc]
    if world.recalls and len(world.num_blocks) > 1 and world.recall_rng.random() < 0.3:
        own = world.recall_rng
        replica, at, duration_s = own.choice(list(world.num_blocks)), own.uniform(0, BUSY_S), own.uniform(0.1, 2.0)
        world.clock.at(at, lambda: world.drain(replica, duration_s))
    if world.calm:
        return
    _plan_kills(world, rng)
    _plan_hangs(world, rng)
    for _ in range(rng.choice([0, 0, 0, 1, 2])):
        name = rng.choice([*world.ingress_names, *(f"scheduler-{replica}" for replica in world.num_blocks)])
        replica = name.partition("-")[2] if name.startswith("scheduler") else rng.choice(list(world.num_blocks))
        _some(world, 1, lambda name=name, replica=replica: world.break_connection(name, replica))  # type: ignore[misc]


def _plan_kills(world: World, rng: random.Random) -> None:
    """Single deaths, deaths of one kind together, and second deaths while the first one is being repaired."""
    workers = [f"worker-{replica}" for replica in world.num_blocks]
    schedulers = [f"scheduler-{replica}" for replica in world.num_blocks]
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        groups = [["router"], [rng.choice(workers)], [rng.choice(schedulers)], workers[:2], schedulers]
        groups += [["router", rng.choice(workers)], ["router", rng.choice(schedulers)]]
        replica = rng.choice(list(world.num_blocks))
        groups.append([f"worker-{replica}", f"scheduler-{replica}"])
        names, at = rng.choice(groups), rng.uniform(0.05, BUSY_S + 0.5)
        for name in names:
            away_s = rng.choice([rng.uniform(0.05, 0.3), rng.uniform(0.05, 3.0)])
            _kill(world, at + rng.choice([0, 0, rng.uniform(0, 0.1)]), name, away_s)
            if rng.random() < 0.25:
                _kill(world, at + away_s + rng.uniform(0, 0.3), name, rng.uniform(0.05, 1.0))
    own = world.offload_rng
    if own.random() < 0.4:
        name = own.choice([f"manager-{replica}" for replica in world.num_blocks])
        _kill(world, own.uniform(0.05, BUSY_S + 0.5), name, own.uniform(0.05, 3.0))
    if rng.random() < 0.1:
        _kill(world, rng.uniform(0.05, BUSY_S + 0.5), rng.choice(world.ingress_names), 0.0)


def _kill(world: World, at: float, name: str, away_s: float) -> None:
    world.clock.at(at, lambda: world.kill(name, away_s))


def _plan_hangs(world: World, rng: random.Random) -> None:
    components = list(world.network.living)
    for _ in range(rng.choice([0, 0, 0, 1, 2])):
        name, duration_s = rng.choice(components), rng.choice([rng.uniform(0.01, 0.3), rng.uniform(2, 3)])
        if name.startswith("ingress") and rng.random() < 0.1:
            duration_s = 11.5  # the Router asks whether it lives
        _some(world, 1, lambda name=name, duration_s=duration_s: world.hang(name, duration_s))  # type: ignore[misc]
    own = world.ingress_rng
    if own.random() < 0.15:  # longer than a worker waits for a poll before it asks
        ingress = own.choice(world.ingress_names)
        world.clock.at(own.uniform(0, BUSY_S), lambda: world.hang(ingress, own.uniform(3, 4)))


def _some(world: World, times: int, action: Callable[[], None]) -> None:
    for _ in range(times):
        world.clock.at(world.rng.uniform(0, BUSY_S + 0.5), action)
