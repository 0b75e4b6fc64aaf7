"""Messages to a process that hosts components, about all of them; no decision depends on the answers."""

from __future__ import annotations

from typing import Protocol

from actors.calls.message import message
from core.messages.series import Activities, NamesQuery, RecentReply
from core.messages.status import ComponentRows


class HostCalls(Protocol):
    """A process with components."""

    @message()
    async def rows(self) -> ComponentRows:
        """Returns the current status of every component of the process."""

    @message()
    async def activity(self, query: NamesQuery) -> Activities:
        """Returns the current status of the named components of the process and their counts since their start."""

    @message()
    async def recent(self, query: NamesQuery) -> RecentReply:
        """Returns the last decisions of the named components of the process."""
