"""Replicas as small numbers: bits of a mask and places of an array."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from core.errors import InvalidValueError
from policies.placement.base import ReplicaLoad

Floats = npt.NDArray[np.float64]


class ReplicaSlots:
    """A number for each replica that is known, given again when it is gone, and which of them are open.

    Attributes:
        names: By slot; empty for a free slot.
        open_mask: Bits of those that a request may go to.
        closed: By slot, 0 for those and infinity for the others: what to add before a minimum is taken.
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
        """A slot for a replica that has none; whether there was none like it before."""
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
        """The replica is gone: nothing goes there, its slot may be another one's."""
        slot = self._slots.pop(name)
        self.names[slot] = ""
        self.closed[slot] = np.inf
        self._loads = None

    def open(self, loads: tuple[ReplicaLoad, ...]) -> None:
        """Makes these the ones that a request may go to. O(replicas), O(1) if it is the object of the last call."""
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
    """Whether one bit at most is set."""
    return not mask & (mask - 1)


def bits(mask: int, num_slots: int) -> npt.NDArray[np.bool_]:
    """By slot, whether its bit is set."""
    octets = np.frombuffer(mask.to_bytes(-(-num_slots // 8), "little"), np.uint8)
    return np.unpackbits(octets, count=num_slots, bitorder="little").view(np.bool_)
