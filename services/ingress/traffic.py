"""The report of an ingress replica for the history of the service; no request waits for it."""

from __future__ import annotations

import asyncio
import logging

from actors.runtime.peer import PeerBook, PeerLost
from core.errors import FarsightError
from core.series.tally import TrafficTally

REPORT_S = 0.5
"""Seconds between two reports: half of a point of the history, so that each point holds the counts of its second."""

TIMEOUT_S = 1.0

logger = logging.getLogger(__name__)


class TrafficReports:
    """Sends counts since the start of the replica, so that a lost report loses nothing.

    Args:
        ingress_id: As in the name of the replica's component.
    """

    def __init__(self, peers: PeerBook, tally: TrafficTally, ingress_id: str) -> None:
        self._supervisor = peers.supervisor()
        self._tally = tally
        self._ingress_id = ingress_id

    async def run(self) -> None:
        """Reports until it is cancelled."""
        while True:
            await self.report()
            await asyncio.sleep(REPORT_S)

    async def report(self) -> None:
        """Sends one report; without a Supervisor, the next report holds its counts."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._supervisor.count_traffic(self._tally.counts(self._ingress_id))
        except (PeerLost, TimeoutError):
            return
        except FarsightError:
            logger.exception("the Supervisor took no counts of traffic")
