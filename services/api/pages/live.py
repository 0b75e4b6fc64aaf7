"""``/live``: what the operators' pages poll. For keys with the role ``observe``; numbers and names, no text of prompts
or answers.

A page asks for several parts in one answer. Each part is encoded once, and the pages share the bytes for a moment: what
open pages cost depends little on how many they are.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

from fastapi import APIRouter, Query
from pydantic import BaseModel, TypeAdapter
from starlette.responses import Response

from farsight.core.decisions import Facts, unpack_decisions
from farsight.core.messages.live import LiveView, SessionsQuery, SessionsView
from farsight.core.messages.placement import PlacementView
from farsight.core.messages.series import (
    ComponentsQuery,
    LifeEvent,
    RecentDecisions,
    SeriesColumn,
    SeriesQuery,
    TableReply,
)
from farsight.services.api.answers.replies import Status, status_reply
from farsight.services.api.backend import Generator, Operator
from farsight.services.api.errors import ApiError, ErrorReply, or_unavailable
from farsight.services.api.pages.explain import RESPONSE_ID, Explanation, explanation, unknown_request
from farsight.services.api.pages.sentences import sentence

MAX_ROWS = 200
"""Requests of each replica, and sessions, in one answer."""

FOR_S = {
    **{"status": 1.5, "requests": 0.75, "placement": 0.75, "series": 0.75, "replicas": 0.75, "components": 0.75},
    "sessions": 1.5,
}
"""The parts, and for how long pages share each. ``/status`` is always of now."""

MOST_KEYS = 6
"""Questions whose answers are shared: a page that has just been opened asks for all points, the others for new ones."""

MAX_DECISIONS = 60

_LIVE, _PLACEMENT, _SESSIONS = TypeAdapter(LiveView), TypeAdapter(PlacementView), TypeAdapter(SessionsView)

Lines = dict[str, list[float | None]]
"""Values by the name of their line, one a point, null where there is none."""


class Series(BaseModel):
    """Points in time: ``at`` in seconds since the epoch.

    Attributes:
        tenants: GPU-seconds a second by tenant.
        ttft_s: Percentiles 50, 90 and 99 of the time to the first token over ``span``; empty where none is asked for.
    """

    at: list[float]
    columns: Lines
    tenants: Lines
    ttft_s: list[float | None]


class Table(BaseModel):
    """Lines of several things of a kind, by their names; ``num_left_out`` found no room."""

    at: list[float]
    rows: dict[str, Lines]
    num_left_out: int


class ComponentDecision(BaseModel):
    """What a component decided, as a sentence and with its numbers; ``at`` in seconds since the epoch."""

    component: str
    at: float
    kind: str
    text: str
    facts: Facts


class Components(Table):
    """The components of one kind over time; ``events`` and ``decisions`` newest first."""

    events: list[LifeEvent]
    decisions: list[ComponentDecision]


class PartQuestion(NamedTuple):
    """What one part is asked for; fields that a part does not need hold their defaults, so that answers are shared."""

    part: str
    span: SeriesQuery = SeriesQuery()
    kind: str = ""


T = TypeVar("T")

K = TypeVar("K")


class Recent(Generic[T]):
    """Reads at most once in ``for_s`` seconds; those that ask meanwhile get the same answer. An error is not kept.

    Args:
        read: Reads the answer.
        clock: Seconds; never goes back.
    """

    def __init__(self, read: Callable[[], Awaitable[T]], for_s: float, clock: Callable[[], float] = time.monotonic):
        self._read = read
        self._for_s = for_s
        self._clock = clock
        self._lock = asyncio.Lock()
        self._known: tuple[float, T] | None = None

    def is_shared(self, now: float) -> bool:
        """Tells whether its answer is new enough, or being read."""
        return self._lock.locked() or (self._known is not None and now - self._known[0] < self._for_s)

    async def get(self) -> T:
        """Returns the answer, at most ``for_s`` older than the question."""
        async with self._lock:
            now = self._clock()
            if self._known is None or now - self._known[0] >= self._for_s:
                self._known = now, await self._read()
            return self._known[1]


class RecentByKey(Generic[K, T]):
    """The same for questions that differ by a key. Answers that are too old are forgotten with the next question, and
    the oldest of more than ``most``.

    Args:
        read: Reads the answer to a key.
        clock: As for ``Recent``.
    """

    def __init__(
        self, read: Callable[[K], Awaitable[T]], for_s: float, most: int, clock: Callable[[], float] = time.monotonic
    ):
        self._read = read
        self._for_s = for_s
        self._most = most
        self._clock = clock
        self._known: dict[K, Recent[T]] = {}

    def __len__(self) -> int:
        """Answers that are kept."""
        return len(self._known)

    async def get(self, key: K) -> T:
        """Returns the answer to this key, at most ``for_s`` older than the question."""
        now = self._clock()
        self._known = {each: recent for each, recent in self._known.items() if recent.is_shared(now)}
        if key not in self._known:
            self._known[key] = Recent(lambda: self._read(key), self._for_s, self._clock)
            while len(self._known) > self._most:
                del self._known[next(iter(self._known))]
        return await self._known[key].get()


class LiveParts:
    """Draws up the parts.

    Args:
        generator: Its model is named beside the components.
    """

    def __init__(self, generator: Generator, operator: Operator) -> None:
        self._generator, self._operator = generator, operator
        self._recent = {part: RecentByKey(self._read, for_s, MOST_KEYS) for part, for_s in FOR_S.items()}

    async def get(self, part: str, span: SeriesQuery, kind: str) -> bytes:
        """Returns a part as JSON.

        Raises:
            FarsightError: The component that knows does not answer.
        """
        if part not in ("series", "replicas", "components"):
            span = SeriesQuery()
        elif part != "series":
            span = SeriesQuery(span.by_minute, span.after)
        return await self._recent[part].get(PartQuestion(part, span, kind if part == "components" else ""))

    async def _read(self, asked: PartQuestion) -> bytes:
        operator = self._operator
        match asked.part:
            case "status":
                return status_reply(await operator.last_status(), self._generator.model).model_dump_json().encode()
            case "requests":
                return _LIVE.dump_json(await operator.live(MAX_ROWS))
            case "placement":
                return _PLACEMENT.dump_json(await operator.answer("the Router", operator.router.placement()))
            case "sessions":
                found = operator.router.sessions(SessionsQuery(MAX_ROWS))
                return _SESSIONS.dump_json(await operator.answer("the Router", found))
            case "series":
                return (await self._series(asked.span)).model_dump_json().encode()
            case "replicas":
                loads = await operator.answer("the Supervisor", operator.supervisor.replica_series(asked.span))
                return Table(**_table(loads)).model_dump_json().encode()
        return (await self._components(asked)).model_dump_json().encode()

    async def _series(self, span: SeriesQuery) -> Series:
        reply = await self._operator.answer("the Supervisor", self._operator.supervisor.series(span))
        return Series(
            at=_instants(reply.at),
            columns=_lines(reply.columns),
            tenants=_lines(reply.tenants),
            ttft_s=list(map(_short, reply.ttft_s)),
        )

    async def _components(self, asked: PartQuestion) -> Components:
        operator = self._operator
        reply, decided = await asyncio.gather(
            operator.answer(
                "the Supervisor", operator.supervisor.component_series(ComponentsQuery(asked.kind, asked.span))
            ),
            operator.recent_decisions(asked.kind),
        )
        return Components(**_table(reply.lines), events=list(reply.events), decisions=_decisions(decided))


def _table(reply: TableReply) -> dict[str, Any]:
    return {
        "at": _instants(reply.at),
        "rows": {row.name: _lines(row.columns) for row in reply.rows},
        "num_left_out": reply.num_left_out,
    }


def _decisions(found: Iterable[RecentDecisions]) -> list[ComponentDecision]:
    """Returns all components together, the newest decision first."""
    pairs = [(each.component, decision) for each in found for decision in unpack_decisions(each.decisions)]
    pairs.sort(key=lambda pair: pair[1].at, reverse=True)
    return [
        ComponentDecision(component=name, at=each.at, kind=each.kind, text=sentence(each), facts=each.facts)
        for name, each in pairs[:MAX_DECISIONS]
    ]


def _instants(at: Iterable[float]) -> list[float]:
    return [round(each, 3) for each in at]


def _lines(columns: Iterable[SeriesColumn]) -> Lines:
    return {column.name: list(map(_short, column.values)) for column in columns}


def _short(value: float | None) -> float | None:
    """Rounds to four digits, more than a chart shows."""
    return None if value is None else float(f"{value:.4g}")


_ERRORS: dict[int | str, dict[str, Any]] = {
    503: {"model": ErrorReply, "description": "The component that knows does not answer now."}
}

Step = Literal["second", "minute"]
After = Annotated[float, Query(ge=0.0)]
Span = Annotated[float, Query(ge=0.0, le=86400.0)]
Kind = Annotated[str, Query(max_length=64)]
Parts = Annotated[
    str, Query(alias="parts", max_length=256, description=f"Some of {', '.join(FOR_S)}, separated by commas.")
]


def live_routes(generator: Generator, operator: Operator) -> APIRouter:
    """Returns the routes, which show the requests of all tenants."""
    router = APIRouter(tags=["operation"], responses=_ERRORS)
    parts = LiveParts(generator, operator)
    router.add_api_route("/live", _page_answer(parts), response_model=dict[str, Any])

    async def one(part: str, step: Step = "second", after: float = 0.0, kind: str = "", span: float = 0.0) -> Response:
        with or_unavailable():
            return _json(await parts.get(part, SeriesQuery(step == "minute", after, span), kind))

    @router.get("/live/status", response_model=Status)
    async def status() -> Response:
        return await one("status")

    @router.get("/live/series", response_model=Series)
    async def series(step: Step = "second", after: After = 0.0, span: Span = 0.0) -> Response:
        return await one("series", step, after, span=span)

    @router.get("/live/replicas", response_model=Table)
    async def replicas(step: Step = "second", after: After = 0.0) -> Response:
        return await one("replicas", step, after)

    @router.get("/live/components", response_model=Components)
    async def components(kind: Kind, step: Step = "second", after: After = 0.0) -> Response:
        return await one("components", step, after, kind)

    @router.get("/live/sessions", response_model=SessionsView)
    async def sessions() -> Response:
        return await one("sessions")

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

    async def live(
        asked: Parts, step: Step = "second", after: After = 0.0, kind: Kind = "", span: Span = 0.0
    ) -> Response:
        """Several parts in one answer; a part that cannot be read is an ``error``."""
        names = list(dict.fromkeys(asked.split(",")))
        unknown = [name for name in names if name not in FOR_S]
        if unknown:
            raise ApiError(f"parts holds {unknown[0]!r}, expected some of {', '.join(FOR_S)}", param="parts")
        asked_span = SeriesQuery(step == "minute", after, span)
        found = await asyncio.gather(*(_or_error(parts, name, asked_span, kind) for name in names))
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
