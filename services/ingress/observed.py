"""The part of an ingress replica that operators see: status, placement, history, and what is on the replicas now."""

from __future__ import annotations

from core.messages.live import LiveView
from core.messages.placement import PlacementView
from core.messages.series import SeriesQuery, SeriesReply
from core.messages.status import StatusReply
from core.series.tally import TrafficTally
from services.ingress.overview import Overview


class ObservedService:
    """Answers from all processes; see ``GenerationBackend``."""

    _overview: Overview
    tally: TrafficTally

    async def status(self) -> StatusReply:
        """One row for every logical component."""
        return await self._overview.status()

    async def placement(self) -> PlacementView:
        """What the Router says of its placements.

        Raises:
            FarsightError: It does not answer.
        """
        return await self._overview.placement()

    async def series(self, query: SeriesQuery) -> SeriesReply:
        """The history of the service.

        Raises:
            FarsightError: The Supervisor does not answer.
        """
        return await self._overview.series(query)

    async def live(self, max_rows: int) -> LiveView:
        """What is on the replicas now; at most so many requests of each."""
        return await self._overview.live(max_rows)
