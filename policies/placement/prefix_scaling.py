"""Detects prefixes that have become too popular for the replicas that cache them (Preble, section 4.2: autoscaling)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from policies.placement.prefix_tree import PrefixNode


@dataclass(slots=True, eq=False)
class _Queueing:
    """Requests of one prefix and the seconds they waited, in the earlier and the later half of the window."""

    num_early: int = 0
    num_late: int = 0
    early_s: float = 0.0
    late_s: float = 0.0


class PrefixScaling:
    """Queueing times by prefix; tells whether their mean has doubled between the two halves of the window.

    Every operation is amortised O(1).
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._early: deque[tuple[float, PrefixNode, _Queueing, float]] = deque()
        self._late: deque[tuple[float, PrefixNode, _Queueing, float]] = deque()
        self._queueing: dict[PrefixNode, _Queueing] = {}

    def observe(self, prefix: PrefixNode, queue_s: float, now: float) -> None:
        """Records how long a request of this prefix waited before it first ran."""
        queueing = self._queueing.setdefault(prefix, _Queueing())
        queueing.num_late += 1
        queueing.late_s += queue_s
        self._late.append((now, prefix, queueing, queue_s))

    def advance(self, now: float) -> None:
        """Moves the end of the window to ``now``: samples pass into its earlier half and out of it."""
        while self._late and self._late[0][0] <= now - self._window_s / 2:
            sample = self._late.popleft()
            _, _, queueing, queue_s = sample
            self._early.append(sample)
            queueing.num_late -= 1
            queueing.late_s -= queue_s
            queueing.num_early += 1
            queueing.early_s += queue_s
        while self._early and self._early[0][0] <= now - self._window_s:
            _, prefix, queueing, queue_s = self._early.popleft()
            queueing.num_early -= 1
            queueing.early_s -= queue_s
            if not queueing.num_early + queueing.num_late and self._queueing.get(prefix) is queueing:
                del self._queueing[prefix]

    def doubled(self, prefix: PrefixNode) -> bool:
        """Returns whether the mean wait of the later half's requests is at least twice that of the earlier half."""
        queueing = self._queueing.get(prefix)
        if queueing is None or not queueing.num_early or not queueing.num_late:
            return False
        late_s = queueing.late_s / queueing.num_late
        return late_s > 0 and late_s >= 2 * queueing.early_s / queueing.num_early

    def restart(self, prefix: PrefixNode) -> None:
        """Discards the prefix's samples; called when it gets another replica."""
        self._queueing.pop(prefix, None)
