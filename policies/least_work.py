"""Placement on the replica with the least work outstanding."""

from __future__ import annotations

from collections.abc import Sequence

from core.request import Request
from policies.placement import ReplicaLoad


class LeastWork:
    """Goes where the fewest tokens are outstanding; of equals the first. O(replicas)."""

    def choose(self, request: Request, loads: Sequence[ReplicaLoad]) -> str:
        """The replica for this request, of those given (never empty)."""
        return min(loads, key=lambda load: load.work_tokens).name
