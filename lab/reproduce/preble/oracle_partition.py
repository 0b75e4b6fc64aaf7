"""Placement by a partition of the prefixes that is fixed in advance: the oracle baseline of Preble (section 5.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from farsight.core.errors import InvalidValueError
from farsight.core.request import Request
from farsight.policies.placement.base import Choice, Placement, ReplicaLoad


class OraclePartition(Placement):
    """Each prefix belongs to one replica, and the known loads of the prefixes are shared out evenly.

    The heaviest prefix goes to the lightest replica first. Unknown prefixes go to the lightest one. O(1) a placement.

    Args:
        loads: The future load of each prefix, in any unit, by the path element that tells the prefixes apart.
        num_replicas: Number of owners; owner i is the i-th (modulo their number) of the replicas that take requests.
        block_size: Tokens of a path element.
        num_leading: Path elements before that element, which all prefixes share.
    """

    def __init__(self, loads: Mapping[int, float], num_replicas: int, block_size: int, num_leading: int = 0) -> None:
        if num_replicas < 1:
            raise InvalidValueError("num_replicas", num_replicas, "an integer >= 1")
        if block_size < 1:
            raise InvalidValueError("block_size", block_size, "an integer >= 1")
        self.block_size = block_size
        self._num_leading = num_leading
        self._owners: dict[int, int] = {}
        totals = [0.0] * num_replicas
        for first, load in sorted(loads.items(), key=lambda item: (-item[1], item[0])):
            owner = totals.index(min(totals))
            self._owners[first] = owner
            totals[owner] += load
        self._lightest = totals.index(min(totals))

    def choose(self, request: Request, prefix: Sequence[int], loads: tuple[ReplicaLoad, ...], now: float) -> Choice:
        """Chooses the owner of the request's prefix among ``loads``."""
        head = prefix[self._num_leading] if len(prefix) > self._num_leading else None
        known = head in self._owners
        owner = self._lightest if head is None else self._owners.get(head, self._lightest)
        return Choice(loads[owner % len(loads)].name, "owner of the prefix" if known else "unknown prefix")
