"""The part of an ingress replica that operators see: status, placement, history, and what is on the replicas now."""

from __future__ import annotations

from core.messages.live import LiveView
from core.messages.placement import PlacementView
from core.messages.series import ComponentsQuery, ComponentsReply, RecentDecisions, SeriesQuery, SeriesReply, TableReply
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

    async def last_status(self) -> StatusReply:
        """The same, some seconds old and cheaper."""
        return await self._overview.last_status()

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

    async def replica_series(self, query: SeriesQuery) -> TableReply:
        """The loads of the replicas over time.

        Raises:
            FarsightError: The Supervisor does not answer.
        """
        return await self._overview.replica_series(query)

    async def component_series(self, query: ComponentsQuery) -> ComponentsReply:
        """What the components of a kind did over time.

        Raises:
            FarsightError: The Supervisor does not answer.
        """
        return await self._overview.component_series(query)

    async def recent_decisions(self, kind: str) -> tuple[RecentDecisions, ...]:
        """The last decisions of the components of a kind, of those that answer."""
        return await self._overview.recent_decisions(kind)

    async def live(self, max_rows: int) -> LiveView:
        """What is on the replicas now; at most so many requests of each."""
        return await self._overview.live(max_rows)
