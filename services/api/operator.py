"""What operators see of a service, and change: the view that pages and admin routes are given."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol, TypeVar

from actors.calls.scheduling import RouterCalls
from actors.calls.supervisor import SupervisorCalls
from core.messages.live import LiveView
from core.messages.log import LoggedWindow, RequestTrace
from core.messages.series import RecentDecisions
from core.messages.status import StatusReply

R = TypeVar("R")


class Operator(Protocol):
    """The components of a service, and what several of them say together.

    A question to one component is put as the message that it answers:
    ``await operator.answer("the Supervisor", operator.supervisor.series(query))``. Orders take long, and are awaited
    without ``answer``.
    """

    @property
    def supervisor(self) -> SupervisorCalls: ...

    @property
    def router(self) -> RouterCalls: ...

    async def answer(self, who: str, asked: Awaitable[R]) -> R:
        """Returns what a component says to a message, if it does so within a second.

        Raises:
            FarsightError: The component cannot be reached now.
        """
        ...

    async def status(self) -> StatusReply:
        """Returns one row for each component that there should be."""
        ...

    async def last_status(self) -> StatusReply:
        """Returns the same, at most some seconds old, for pages that ask again and again."""
        ...

    async def metrics(self, *, open_metrics: bool) -> str:
        """Returns the metrics of every process that answers, merged into one exposition (``metrics_page``)."""
        ...

    async def recent_decisions(self, kind: str) -> tuple[RecentDecisions, ...]:
        """Returns the last decisions of the components of a kind, of those that answer."""
        ...

    async def live(self, max_rows: int) -> LiveView:
        """Returns what is on the replicas now; at most so many requests of each."""
        ...

    async def explain(self, response_id: str) -> tuple[RequestTrace, ...]:
        """Returns the decision traces behind an answer, whoever's it is; none if it is unknown or too old.

        Raises:
            FarsightError: The decision log cannot be read now.
        """
        ...

    async def logged_around(self, request_id: str) -> LoggedWindow | None:
        """Returns the log around a request that has ended; None if the log does not hold it any more.

        Raises:
            FarsightError: The log cannot be read now, or steps have not been measured.
        """
        ...

    async def healthy(self) -> bool:
        """Returns whether a request sent now would be served."""
        ...
