"""Placements that look at no prompt: in turn, which is the baseline of Preble and fair when requests cost alike; and on
the replica with the least work outstanding.
"""

from __future__ import annotations

from collections.abc import Sequence

from core.request import Request
from policies.placement.base import PLACEMENTS, Choice, LoadChoice, Placement, ReplicaLoad
from policies.settings import PolicySettings


class RoundRobin(Placement):
    """Each request goes to the next replica. O(1)."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: Request, prefix: Sequence[int], loads: tuple[ReplicaLoad, ...], now: float) -> Choice:
        """The replica for this request, of those given (never empty)."""
        chosen = loads[self._next % len(loads)].name
        self._next += 1
        return Choice(chosen, "in turn")


@PLACEMENTS.register("round-robin")
def build_round_robin(settings: PolicySettings) -> RoundRobin:
    """Replicas in turn."""
    return RoundRobin()


class LeastWork(Placement):
    """Goes where the fewest tokens are outstanding; of equals the first. O(replicas)."""

    def choose(self, request: Request, prefix: Sequence[int], loads: tuple[ReplicaLoad, ...], now: float) -> Choice:
        """The replica for this request, of those given (never empty)."""
        least, most = min(loads, key=_work), max(loads, key=_work)
        return LoadChoice(
            least.name,
            "least work",
            work_tokens=least.work_tokens,
            most_work_tokens=most.work_tokens,
            num_replicas=len(loads),
        )


def _work(load: ReplicaLoad) -> float:
    return load.work_tokens


@PLACEMENTS.register("least-work")
def build_least_work(settings: PolicySettings) -> LeastWork:
    """The replica with the fewest outstanding tokens."""
    return LeastWork()
