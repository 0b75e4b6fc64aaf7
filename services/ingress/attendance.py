"""The exchange of an ingress replica with the Supervisor: whether one watches over the service, and when to drain."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable

from actors.runtime.peer import PeerBook, PeerLost
from core.messages.drains import IngressReport
from services.api.readiness import Readiness

ATTEND_S = 0.5
"""Seconds between two reports."""

SUPERVISED_S = 5.0
"""An ingress replica that has had no answer of the Supervisor for so long is unhealthy: what dies is not replaced."""

STOPPED = "the server is stopping, and the time for requests to end is over"


class Attendance:
    """Reports to the Supervisor until it is cancelled.

    Once it has heard that the service drains, it refuses new requests for the rest of its life, and ends at the time it
    was told whatever is still open. Neither needs the Supervisor to go on.

    Args:
        end_streams: Ends all open requests with an error that holds the given reason.
    """

    def __init__(self, peers: PeerBook, readiness: Readiness, end_streams: Callable[[str], None]) -> None:
        self._supervisor = peers.supervisor()
        self._readiness = readiness
        self._end_streams = end_streams
        self._ingress_id = uuid.uuid4().hex
        self._ends_at = 0.0
        self._end: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        while True:
            await self.attend()
            await asyncio.sleep(ATTEND_S)

    async def attend(self) -> None:
        """One report."""
        readiness = self._readiness
        report = IngressReport(self._ingress_id, readiness.num_open, readiness.is_draining)
        try:
            async with asyncio.timeout(SUPERVISED_S):
                orders = await self._supervisor.attend(report)
        except (PeerLost, TimeoutError):
            return
        readiness.attended()
        if orders.drain_s is not None:
            self._drain(orders.drain_s)

    def _drain(self, drain_s: float) -> None:
        """A later order may end the drain sooner, never later."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + drain_s
        self._readiness.is_draining = True
        if self._end is not None and ends_at >= self._ends_at:
            return
        if self._end is not None:
            self._end.cancel()
        self._ends_at, self._end = ends_at, loop.call_at(ends_at, self._end_streams, STOPPED)
