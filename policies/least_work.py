"""Placement on the replica with the least work outstanding."""

from __future__ import annotations

from collections.abc import Sequence

from core.request import Request
from policies.placement import Choice, Placement, ReplicaLoad


class LeastWork(Placement):
    """Goes where the fewest tokens are outstanding; of equals the first. O(replicas)."""

    def choose(self, request: Request, prefix: Sequence[int], loads: tuple[ReplicaLoad, ...], now: float) -> Choice:
        """The replica for this request, of those given (never empty)."""
        return Choice(min(loads, key=lambda load: load.work_tokens).name, "least work")
