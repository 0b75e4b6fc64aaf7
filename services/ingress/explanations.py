"""Collects what is known of one answer: its decision traces, and its record in the log with the requests around it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterable

from farsight.actors.runtime.peer import PeerBook
from farsight.core.config.load import FarsightConfig
from farsight.core.errors import FarsightError
from farsight.core.messages.log import (
    FinishedRequest,
    LoggedWindow,
    LogQuery,
    RequestTrace,
    RequestTraces,
    ServedAs,
    TraceQuery,
)
from farsight.core.messages.requests import LoadSnapshot

TIMEOUT_S = 2.0

PAGE = 1000
"""Records of one reply: reading them takes about 10 ms of the event loop."""

MOST_RECORDS = 10_000
"""Latest ended requests that are searched."""

MOST_BEFORE = 2000
"""Records before the request's own that are read."""

SEARCH_TIMEOUT_S = 5.0
_END = 2**63 - 1


def served_settings(config: FarsightConfig) -> str:
    """Returns the tables of a server by which its policies decide, as ``ServedAs.settings``."""
    return json.dumps({name: dataclasses.asdict(getattr(config, name)) for name in ("scheduler", "placement", "batch")})


class Explanations:
    """Asks the log store, and the Router, which asks the Schedulers.

    Args:
        config: The service's configuration.
    """

    def __init__(self, peers: PeerBook, config: FarsightConfig) -> None:
        self._router = peers.router()
        self._log_store = peers.log_store()
        self._settings = served_settings(config)

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

    async def around(self, request_id: str, seen: LoadSnapshot | None) -> LoggedWindow | None:
        """Returns the window of the log around a request; None if it is not among the latest.

        Args:
            request_id: Empty for the latest requests.
            seen: The load now, which tells how a replica runs.

        Raises:
            FarsightError: The log cannot be read now, or steps have not been measured.
        """
        if seen is None or seen.cost is None or not seen.num_replicas or not seen.kv_tokens:
            raise FarsightError("the cost of steps has not been measured yet")
        try:
            records = await asyncio.wait_for(self._records(request_id), SEARCH_TIMEOUT_S)
        except TimeoutError as error:
            raise FarsightError("the log does not answer") from error
        if records is None:
            return None
        served = ServedAs(self._settings, seen.num_replicas, seen.kv_tokens, seen.max_num_seqs, seen.cost)
        return LoggedWindow(request_id, served, records)

    async def _records(self, request_id: str) -> tuple[FinishedRequest, ...] | None:
        end = (await self._log_store.read(LogQuery(_END, 0))).last_row
        if not request_id:
            return (await self._log_store.read(LogQuery(max(0, end - PAGE), PAGE))).records
        lowest = max(0, end - MOST_RECORDS)
        records: tuple[FinishedRequest, ...] = ()
        before: int | None = None  # records ahead of its own, once it is found
        while end > lowest and (before is None or before < MOST_BEFORE):
            first = max(lowest, end - PAGE)
            page = await self._log_store.read(LogQuery(first, end - first))
            places = [place for place, each in enumerate(page.records) if each.request_id == request_id]
            if before is not None:
                before += len(page.records)
            elif places:
                before = places[0]
            records = (*page.records, *records)
            end = first
        return None if before is None else records


def _traces(reply: RequestTraces | BaseException, failures: list[BaseException]) -> tuple[RequestTrace, ...]:
    if isinstance(reply, FarsightError | TimeoutError):
        failures.append(reply)
        return ()
    if isinstance(reply, BaseException):
        raise reply
    return reply.records
