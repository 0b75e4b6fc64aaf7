"""How clients ask for a resumable stream, and go on reading one: a header, and ``GET /v1/streams/{id}``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from farsight.services.api.access.access_control import AccessControl
from farsight.services.api.access.keys import CURRENT, sent_key
from farsight.services.api.answers.sse import EventStream
from farsight.services.api.backend import Generator
from farsight.services.api.errors import ApiError
from farsight.services.api.fields import shown
from farsight.services.api.generation import Generation
from farsight.services.api.streams.live import EventWriter, LiveStream, events_seen
from farsight.services.api.streams.manager import Hold, StreamManager, hold_nothing
from farsight.services.api.text.dialect import TokenTexts

RESUMABLE_HEADER = "X-Farsight-Resumable"
"""In a request, ``true`` asks for a resumable stream."""

STREAM_HEADER = "X-Farsight-Stream"
"""The answer names the stream here."""

_STREAM_ID = re.compile(r"[0-9a-f]{32}")
_WORDS = {"true": True, "1": True, "false": False, "0": False}


def wants_resumable(headers: Mapping[str, str], generation: Generation) -> bool:
    """Returns what the header says; raises ApiError (400) if that is neither, or if the answer is no stream."""
    value = headers.get(RESUMABLE_HEADER)
    if value is None:
        return False
    wanted = _WORDS.get(value.strip().lower())
    if wanted is None:
        raise _wrong_header(repr(shown(value)), "'true' or 'false'")
    if wanted and not generation.stream:
        raise _wrong_header(repr(value), "'false', or a body with \"stream\": true")
    return wanted


class ResumableStreams:
    """Answers with resumable streams.

    Args:
        access: Counts requests whose clients are gone; None where nothing is counted.
    """

    def __init__(
        self, manager: StreamManager, backend: Generator, texts: TokenTexts, access: AccessControl | None = None
    ) -> None:
        self._manager = manager
        self._backend = backend
        self._texts = texts
        self._access = access

    def begin(self, generation: Generation, headers: Mapping[str, str]) -> Response:
        """Returns the answer to a request that asks for one."""
        identity, tenant = _identity(headers)
        return self._answer(self._manager.start(self._backend, generation, identity, tenant, self._hold()), 0)

    async def resume(self, stream_id: str, headers: Mapping[str, str]) -> Response:
        """Returns the events behind ``Last-Event-ID``; 204 if the client has them all.

        Raises:
            ApiError: As for ``StreamManager.resume``; 400 for a wrong ``Last-Event-ID``.
        """
        if not _STREAM_ID.fullmatch(stream_id):
            message = f"There is no stream {shown(stream_id)!r}; expected the id in the header {STREAM_HEADER}."
            raise ApiError(message, status=404, code="stream_not_found")
        identity, _ = _identity(headers)
        after = events_seen(stream_id, headers.get("Last-Event-ID", ""))
        return self._answer(await self._manager.resume(stream_id, identity, self._backend, self._hold()), after)

    def _answer(self, live: LiveStream, after: int) -> Response:
        stream_id = live.state.stream_id
        writer = EventWriter(stream_id, live.state.record, self._texts)
        return EventStream(live.read(after, writer), {STREAM_HEADER: stream_id}, show=live.show)

    def _hold(self) -> Hold:
        """Counts a request of the caller that goes on without a client."""
        caller, access = CURRENT.get(), self._access
        if caller is None or access is None:
            return hold_nothing
        budget, now = access.budget(caller.tenant), access.now

        def hold() -> Callable[[], None]:
            budget.hold(now())
            return lambda: budget.done(now())

        return hold


def stream_routes(streams: ResumableStreams, errors: dict[int | str, dict[str, Any]]) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["generation"], responses=errors)

    @router.get("/streams/{stream_id}", response_class=Response)
    async def resume_stream(stream_id: str, request: Request) -> Response:
        return await streams.resume(stream_id, request.headers)

    return router


def _identity(headers: Mapping[str, str]) -> tuple[str, str]:
    """Tells who may read the stream, and whose bytes its log takes."""
    caller = CURRENT.get()
    return (sent_key(headers), "") if caller is None else (caller.identity, caller.tenant.name)


def _wrong_header(found: str, expected: str) -> ApiError:
    message = f"{RESUMABLE_HEADER}: got {found}, expected {expected}"
    return ApiError(message, param=RESUMABLE_HEADER, code="invalid_value")
