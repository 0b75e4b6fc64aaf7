"""Wrong keys: counted by client address, slowed beyond a number, in bounded memory."""

from __future__ import annotations

import ipaddress
from collections import OrderedDict

MAX_ADDRESSES = 4096
"""Addresses that are counted at once; the one that failed longest ago is forgotten for a new one."""

MAX_SLOWED = 64
"""Answers that are held back at once; beyond them, wrong keys are answered without delay."""

SLOW_S = 1.0
"""Seconds that the answer to a wrong key is held back."""

MINUTE_S = 60.0


class Failures:
    """Failures of each address, forgotten at a steady rate.

    Args:
        per_minute: Failures of an address that are answered at once.
    """

    def __init__(self, per_minute: int) -> None:
        self._per_minute = per_minute
        self._known: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self.num_slowed = 0

    def __len__(self) -> int:
        return len(self._known)

    def add(self, address: str, now: float) -> float:
        """Counts one failure. Returns the seconds until the address is below its number again; 0 if it is now."""
        network = _network(address)
        count, at = self._known.pop(network, (0.0, now))
        count = max(0.0, count - (now - at) * self._per_minute / MINUTE_S) + 1.0
        self._known[network] = min(count, 2.0 * self._per_minute), now
        if len(self._known) > MAX_ADDRESSES:
            self._known.popitem(last=False)
        return max(0.0, (count - self._per_minute) * MINUTE_S / self._per_minute)


def _network(address: str) -> str:
    """An IPv6 client usually has a whole /64, so that is what is counted."""
    if ":" not in address:
        return address[:64]
    try:
        return str(ipaddress.ip_network(f"{address.partition('%')[0]}/64", strict=False))
    except ValueError:
        return address[:64]
