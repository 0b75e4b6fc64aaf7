"""``/live``: what the operators' pages poll. For keys with the role ``observe``; numbers and names, no text of prompts
or answers."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from starlette.responses import Response

from farsight.core.messages.live import LiveView
from farsight.core.messages.series import SeriesQuery
from farsight.services.api.answers.replies import Status
from farsight.services.api.backend import Generator, Operator
from farsight.services.api.errors import ApiError, ErrorReply, or_unavailable
from farsight.services.api.pages.explain import RESPONSE_ID, Explanation, explanation, unknown_request
from farsight.services.api.pages.live_parts import FOR_S, Components, LiveParts, Series, Table

_ERRORS: dict[int | str, dict[str, Any]] = {
    503: {"model": ErrorReply, "description": "The component that knows does not answer now."}
}

Step = Literal["second", "minute"]
After = Annotated[float, Query(ge=0.0)]
Kind = Annotated[str, Query(max_length=64)]
Parts = Annotated[
    str, Query(alias="parts", max_length=256, description=f"Some of {', '.join(FOR_S)}, separated by commas.")
]


def live_routes(generator: Generator, operator: Operator) -> APIRouter:
    """Returns the routes, which show the requests of all tenants."""
    router = APIRouter(tags=["operation"], responses=_ERRORS)
    parts = LiveParts(generator, operator)
    router.add_api_route("/live", _page_answer(parts), response_model=dict[str, Any])

    async def one(part: str, step: Step = "second", after: float = 0.0, kind: str = "") -> Response:
        with or_unavailable():
            return _json(await parts.get(part, SeriesQuery(step == "minute", after), kind))

    @router.get("/live/status", response_model=Status)
    async def status() -> Response:
        return await one("status")

    @router.get("/live/series", response_model=Series)
    async def series(step: Step = "second", after: After = 0.0) -> Response:
        return await one("series", step, after)

    @router.get("/live/replicas", response_model=Table)
    async def replicas(step: Step = "second", after: After = 0.0) -> Response:
        return await one("replicas", step, after)

    @router.get("/live/components", response_model=Components)
    async def components(kind: Kind, step: Step = "second", after: After = 0.0) -> Response:
        return await one("components", step, after, kind)

    @router.get("/live/requests", response_model=LiveView)
    async def requests() -> Response:
        return await one("requests")

    @router.get("/live/requests/{response_id}")
    async def request(response_id: str) -> Explanation:
        with or_unavailable():
            traces = await operator.explain(response_id) if RESPONSE_ID.fullmatch(response_id) else ()
        if not traces:
            raise unknown_request(response_id)
        return explanation(response_id, traces)

    return router


def _page_answer(parts: LiveParts) -> Any:
    """The handler of ``/live``."""

    async def live(asked: Parts, step: Step = "second", after: After = 0.0, kind: Kind = "") -> Response:
        """Several parts in one answer; a part that cannot be read is an ``error``."""
        names = list(dict.fromkeys(asked.split(",")))
        unknown = [name for name in names if name not in FOR_S]
        if unknown:
            raise ApiError(f"parts holds {unknown[0]!r}, expected some of {', '.join(FOR_S)}", param="parts")
        span = SeriesQuery(step == "minute", after)
        found = await asyncio.gather(*(_or_error(parts, name, span, kind) for name in names))
        bodies = (b'"%s":%s' % (name.encode(), body) for name, body in zip(names, found, strict=True))
        return _json(b"{%s}" % b",".join(bodies))

    return live


async def _or_error(parts: LiveParts, name: str, span: SeriesQuery, kind: str) -> bytes:
    try:
        with or_unavailable():
            return await parts.get(name, span, kind)
    except ApiError as error:
        return json.dumps(error.body()).encode()


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
