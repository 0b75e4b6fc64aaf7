"""Numbers replicas by small slots, which serve as bits of a mask and as indexes of arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from farsight.core.errors import InvalidValueError
from farsight.policies.placement.base import ReplicaLoad

Floats = npt.NDArray[np.float64]


class ReplicaSlots:
    """Assigns a slot to each known replica, reuses slots of replicas that are gone, and marks the open ones.

    Attributes:
        names: Name of the replica, by slot; empty for a free slot.
        open_mask: Bits of the replicas that a request may go to.
        closed: By slot, 0 for open replicas and infinity for all others; added to costs before a minimum is taken.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.open_mask = 0
        self.closed: Floats = np.zeros(0)
        self._slots: dict[str, int] = {}
        self._loads: tuple[ReplicaLoad, ...] | None = None

    def find(self, name: str) -> int | None:
        return self._slots.get(name)

    def take(self, name: str) -> tuple[int, bool]:
        """Assigns a slot to a replica that has none; returns the slot, and whether it is a new one."""
        is_new = "" not in self.names
        slot = len(self.names) if is_new else self.names.index("")
        if is_new:
            self.names.append(name)
            self.closed = np.append(self.closed, np.inf)
        self.names[slot] = name
        self._slots[name] = slot
        self._loads = None
        return slot, is_new

    def give_back(self, name: str) -> None:
        """Frees the slot of a replica that is gone, for another replica to take."""
        slot = self._slots.pop(name)
        self.names[slot] = ""
        self.closed[slot] = np.inf
        self._loads = None

    def open(self, loads: tuple[ReplicaLoad, ...]) -> None:
        """Opens exactly these replicas. O(replicas), or O(1) if ``loads`` is the same object as in the last call."""
        if loads is self._loads:
            return
        self.closed[:] = np.inf
        self.open_mask = 0
        for load in loads:
            slot = self._slots.get(load.name)
            if slot is None:
                raise InvalidValueError("loads", load.name, "a replica that is up")
            self.closed[slot] = 0.0
            self.open_mask |= 1 << slot
        self._loads = loads


def is_single(mask: int) -> bool:
    """Returns whether at most one bit is set."""
    return not mask & (mask - 1)


def bits(mask: int, num_slots: int) -> npt.NDArray[np.bool_]:
    """Returns, by slot, whether its bit is set."""
    octets = np.frombuffer(mask.to_bytes(-(-num_slots // 8), "little"), np.uint8)
    return np.unpackbits(octets, count=num_slots, bitorder="little").view(np.bool_)
