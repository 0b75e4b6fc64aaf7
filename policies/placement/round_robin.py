"""Placement in turn: the baseline of Preble, and fair when requests cost alike."""

from __future__ import annotations

from collections.abc import Sequence

from core.request import Request
from policies.placement.base import PLACEMENTS, Choice, Placement, ReplicaLoad
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
