"""An E2 router for tests, and a driver that gives it requests."""

from __future__ import annotations

import numpy as np

from farsight.core.config.scheduling import PlacementConfig
from farsight.core.messages.plans import KVCacheEvent
from farsight.policies.placement.base import ReplicaLoad
from farsight.policies.placement.e2 import E2Choice, E2Router
from farsight.policies.placement.load_cost import Regressions
from farsight.policies.placement.prefix_tree import Path

LINEAR = Regressions(lambda new, context: new * 1e-3, lambda output, context: output * 2e-3)
"""The examples' PT of 1 ms a token and DT of 2 ms an output token."""

BARE = PlacementConfig(initial_output_len=0.0, balance=False, rebalance=False, autoscale=False)


def loads_of(names: str) -> tuple[ReplicaLoad, ...]:
    return tuple(ReplicaLoad(name, 0, 0.0) for name in names)


def router_of(
    names: str = "ab",
    block_size: int = 1,
    capacity: int = 10_000,
    config: PlacementConfig = BARE,
    regressions: Regressions = LINEAR,
    ties: np.random.Generator | None = None,
) -> E2Router:
    router = E2Router(regressions, block_size, config, ties)
    for name in names:
        router.replica_up(name, capacity)
    return router


def path(start: int, num: int) -> Path:
    return tuple(range(start, start + num))


class Driver:
    """Gives a router requests under names of its own."""

    def __init__(self, router: E2Router, names: str = "ab") -> None:
        self.router = router
        self.loads = loads_of(names)
        self.num = 0

    def place(self, prefix: Path, names: str = "", now: float = 0.0, prompt_len: int | None = None) -> E2Choice:
        loads = loads_of(names) if names else self.loads
        length = len(prefix) * self.router.block_size if prompt_len is None else prompt_len
        self.num += 1
        choice = self.router.place(f"r{self.num}", prefix, length, loads, now)
        self.router.check_integrity()
        return choice

    def end(self, num: int, output_len: int | None = None, now: float = 0.0) -> None:
        self.router.ended(f"r{num}", output_len, now)
        self.router.check_integrity()


def informed(names: str = "ab", capacity: int = 10_000, block_size: int = 1) -> E2Router:
    """Its replicas tell what they cache."""
    router = router_of(names, block_size, capacity)
    for name in names:
        router.noticed(name, KVCacheEvent(1, True))
    return router
