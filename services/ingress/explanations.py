"""Collects the decision traces behind one answer, from the living components and from the log."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from actors.runtime.peer import PeerBook
from core.errors import FarsightError
from core.messages.log import RequestTrace, RequestTraces, TraceQuery

TIMEOUT_S = 2.0


class Explanations:
    """Asks the log store and the Router, which asks the Schedulers."""

    def __init__(self, peers: PeerBook) -> None:
        self._router = peers.router()
        self._log_store = peers.log_store()

    async def find(self, response_id: str, own: Iterable[RequestTrace]) -> tuple[RequestTrace, ...]:
        """Traces the requests behind an answer: each trace once, in order of ids; none if the answer is not known.

        Args:
            own: Traces that the asking ingress replica has itself.

        Raises:
            FarsightError: Nothing is known of the answer, and the Router or the log store could not be asked.
        """
        query = TraceQuery(response_id)
        asked = (self._router.explain(query), self._log_store.read_traces(query))
        replies = await asyncio.gather(*(asyncio.wait_for(each, TIMEOUT_S) for each in asked), return_exceptions=True)
        found: dict[str, RequestTrace] = {}
        failures: list[BaseException] = []
        for traces in (own, *(_traces(reply, failures) for reply in replies)):
            for trace in traces:
                if trace.trace_id not in found or trace.ended:
                    found[trace.trace_id] = trace
        if failures and not found:
            raise FarsightError(f"it cannot be said now: {failures[0]!r}") from failures[0]
        return tuple(found[trace_id] for trace_id in sorted(found))


def _traces(reply: RequestTraces | BaseException, failures: list[BaseException]) -> tuple[RequestTrace, ...]:
    if isinstance(reply, FarsightError | TimeoutError):
        failures.append(reply)
        return ()
    if isinstance(reply, BaseException):
        raise reply
    return reply.records
