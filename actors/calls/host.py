"""What a process that hosts components answers for all of them; no decision depends on it."""

from __future__ import annotations

from typing import Protocol

from actors.calls.message import message
from core.messages.series import Activities, NamesQuery, RecentReply
from core.messages.status import ComponentRows


class HostCalls(Protocol):
    """A process with components."""

    @message()
    async def rows(self) -> ComponentRows:
        """Every component here as it is now."""

    @message()
    async def activity(self, query: NamesQuery) -> Activities:
        """Those named, as they are now, with what each has done since it began."""

    @message()
    async def recent(self, query: NamesQuery) -> RecentReply:
        """The last decisions of those named."""
