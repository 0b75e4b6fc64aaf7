"""``/live/...``: what the operators' pages poll. For keys with the role ``observe``; numbers and names, no text of
prompts or answers."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel

from core.errors import FarsightError
from core.messages.live import LiveView
from core.messages.series import SeriesQuery
from services.api.answers.replies import ErrorReply, Status, status_reply
from services.api.backend import GenerationBackend
from services.api.errors import SERVER_ERROR, ApiError
from services.api.pages.explain import RESPONSE_ID, Explanation, explanation, unknown_request
from services.api.pages.recent import Recent

MAX_ROWS = 200
"""Requests of each replica in one answer."""

STATUS_S = 1.5
"""``/live/status`` is at most so many seconds old: every process is asked for it. ``/status`` is always of now."""

LIVE_S = 0.75

_ERRORS: dict[int | str, dict[str, Any]] = {
    503: {"model": ErrorReply, "description": "The component that knows does not answer now."}
}


class Series(BaseModel):
    """Points in time: ``at`` in seconds since the epoch, and for each line its values, null where there is none.

    Attributes:
        tenants: GPU-seconds a second by tenant.
    """

    at: list[float]
    columns: dict[str, list[float | None]]
    tenants: dict[str, list[float | None]]


def live_routes(backend: GenerationBackend) -> APIRouter:
    """The routes.

    Args:
        backend: Not bound to the caller's tenant: an observer sees the requests of all tenants.
    """
    router = APIRouter(prefix="/live", tags=["operation"], responses=_ERRORS)
    recent_status = Recent(backend.status, STATUS_S)
    recent_live = Recent(lambda: backend.live(MAX_ROWS), LIVE_S)

    @router.get("/status")
    async def status() -> Status:
        return status_reply(await recent_status.get(), backend.model)

    @router.get("/series")
    async def series(step: Literal["second", "minute"] = "second", after: float = Query(0.0, ge=0.0)) -> Series:
        try:
            reply = await backend.series(SeriesQuery(step == "minute", after))
        except FarsightError as error:
            raise _unavailable(error) from error
        return Series(
            at=[round(each, 3) for each in reply.at],
            columns={column.name: list(map(_short, column.values)) for column in reply.columns},
            tenants={column.name: list(map(_short, column.values)) for column in reply.tenants},
        )

    @router.get("/requests")
    async def requests() -> LiveView:
        return await recent_live.get()

    @router.get("/requests/{response_id}")
    async def request(response_id: str) -> Explanation:
        try:
            traces = await backend.explain(response_id) if RESPONSE_ID.fullmatch(response_id) else ()
        except FarsightError as error:
            raise _unavailable(error) from error
        if not traces:
            raise unknown_request(response_id)
        return explanation(response_id, traces)

    return router


def _unavailable(error: FarsightError) -> ApiError:
    return ApiError(str(error), status=503, kind=SERVER_ERROR, code="unavailable")


def _short(value: float | None) -> float | None:
    """Four digits are more than a chart shows."""
    return None if value is None else float(f"{value:.4g}")
