"""Runs lines of a batch against the application of this process, for the endpoints and for ``farsight batch``.

So many are in flight at once, those that are refused for a while are sent again, and results are kept in groups. Where
outputs are forecast, each window of lines begins with the longest: long jobs that begin last would run alone at the
end, while the other places stand empty (longest processing time first; Graham, "Bounds on multiprocessing timing
anomalies", 1969).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope

from farsight.core.errors import FarsightError
from farsight.core.forecast import Forecast
from farsight.services.api.batches.lines import BatchLine, LineResult, answered, unsent

GROUP_LINES, GROUP_S = 32, 0.5
"""Results are kept in groups: at most so many, or those of so many seconds."""

_RETRIED = (429, 503)

Keep = Callable[[Sequence[LineResult]], Awaitable[None]]
"""Stores results, so that a restart does not repeat their lines."""

logger = logging.getLogger(__name__)


class ServiceStalled(FarsightError):
    """The service has refused every request for the whole retry time, so the service is at fault, not a request."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How a request that was refused with 429 or 503 is retried. All times in seconds.

    Attributes:
        give_up_s: Time after which a request is no longer retried.
        first_delay_s: Delay before the second try; it doubles with each try and is never shorter than Retry-After.
        max_delay_s: Limit of the doubling.
    """

    give_up_s: float = 600.0
    first_delay_s: float = 0.5
    max_delay_s: float = 30.0


class Places(Protocol):
    """Bounds the lines in flight, as a semaphore does."""

    async def acquire(self) -> object: ...

    def release(self) -> None: ...


async def run_lines(
    app: ASGIApp,
    lines: Iterable[BatchLine],
    keep: Keep,
    places: Places,
    *,
    retry: RetryPolicy | None = None,
    forecast_lines: ForecastLines | None = None,
) -> None:
    """Sends each line once; returns when all results are kept.

    A cancelled run drops the results that are not kept, whose lines then run again.

    Args:
        keep: Called with each group of results, never twice at once.
        places: One is taken for each line, until its result is on its way to ``keep``.
        forecast_lines: Forecasts lines, of which the longest begin first; None keeps their order.

    Raises:
        ServiceStalled: The service answered no line for the whole retry time of one.
        FarsightError: As ``keep`` raised it.
    """
    results: asyncio.Queue[LineResult | None] = asyncio.Queue(GROUP_LINES)
    sender = LineSender(app, retry or RetryPolicy())

    async def answer(line: BatchLine) -> None:
        await results.put(await sender.send(line))

    async def answer_all() -> None:
        async with asyncio.TaskGroup() as answers:
            async for line in in_order(lines, forecast_lines):
                await places.acquire()
                # Not by the task itself: one that is cancelled before it begins runs no ``finally``.
                answers.create_task(answer(line)).add_done_callback(lambda _: places.release())
        await results.put(None)

    try:
        async with asyncio.TaskGroup() as both:
            both.create_task(answer_all())
            both.create_task(_keep_all(results, keep))
    except* FarsightError as group:
        raise _first(group) from None


async def _keep_all(results: asyncio.Queue[LineResult | None], keep: Keep) -> None:
    """Keeps results until it gets None."""
    ended = False
    while not ended:
        group: list[LineResult] = []
        ended = await _collect(results, group)
        if group:
            await keep(group)


async def _collect(results: asyncio.Queue[LineResult | None], group: list[LineResult]) -> bool:
    """Fills a group; returns whether it holds the last result."""
    result = await results.get()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(GROUP_S):
            while result is not None:
                group.append(result)
                if len(group) == GROUP_LINES:
                    return False
                result = await results.get()
            return True
    return False


def _first(group: BaseExceptionGroup[FarsightError]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class LineSender:
    """Sends one line after another and retries refused ones."""

    def __init__(self, app: ASGIApp, retry: RetryPolicy) -> None:
        self._app = app
        self._retry = retry
        self._last_answer = -math.inf

    async def send(self, line: BatchLine) -> LineResult:
        clock = asyncio.get_running_loop().time
        began, delay = clock(), self._retry.first_delay_s
        while True:
            try:
                reply = await post_json(self._app, line.url, line.body)
            except Exception as error:  # A defect of the application fails this line, not the batch.
                logger.exception("line %d could not be run", line.number)
                return unsent(line.custom_id, "internal_error", f"{type(error).__name__}: {error}")
            if reply.status not in _RETRIED:
                self._last_answer = clock()
                return answered(line.custom_id, reply.status, reply.headers.get("x-request-id"), reply.body)
            pause = max(delay, _retry_after_s(reply))
            if clock() - began + pause > self._retry.give_up_s:
                return self._give_up(line, reply, began)
            await asyncio.sleep(pause)
            delay = min(2 * delay, self._retry.max_delay_s)

    def _give_up(self, line: BatchLine, reply: Reply, began: float) -> LineResult:
        """The final error of a line that stays refused, if the service answered other lines meanwhile."""
        told = f"{reply.status} ({_message(reply)})"
        if self._last_answer < began:
            message = f"the service answered no request for {self._retry.give_up_s:g} s; the last refusal was {told}"
            raise ServiceStalled(f"{message}. Finished results are kept; run the same command again to resume")
        message = f"Refused for {self._retry.give_up_s:g} s, the last time with {told}."
        return unsent(line.custom_id, "retries_exhausted", message)


def _retry_after_s(reply: Reply) -> float:
    """Retry-After in seconds; 0 if the header is missing or is a date, which this service does not send."""
    value = reply.headers.get("retry-after", "")
    return float(value) if value.isdecimal() else 0.0


def _message(reply: Reply) -> str:
    try:
        return str(json.loads(reply.body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "no reason given"


WINDOW_LINES = 256
"""So many lines are forecast and put in order together: each line waits for the forecasts of its window alone, and a
forecaster that has learned from the first windows serves the later ones."""

ForecastLines = Callable[[Sequence[BatchLine]], Awaitable[Sequence[Forecast | None]]]
"""Forecasts the outputs of lines, in their order; None for a line of which nothing can be said."""


async def in_order(lines: Iterable[BatchLine], forecast_lines: ForecastLines | None) -> AsyncGenerator[BatchLine, None]:
    """Yields the lines in the order in which they begin, which is theirs where outputs are not forecast."""
    rest = iter(lines)
    while window := list(islice(rest, WINDOW_LINES)):
        if forecast_lines is not None and len(window) > 1:
            forecasts = await forecast_lines(window)
            window = [window[index] for index in longest_first(forecasts)]
        for line in window:
            yield line


def longest_first(forecasts: Sequence[Forecast | None]) -> list[int]:
    """Returns the indices by falling forecast; those of equal ones and, at the end, those without one in their order.

    Ranks are compared only where all forecasts have one of the same version (``Forecast.rank``), else means.
    """
    known = [each for each in forecasts if each is not None]
    comparable = len({(each.source, each.version) for each in known}) == 1
    by_rank = comparable and all(each.rank is not None for each in known)

    def key(index: int) -> tuple[bool, float]:
        forecast = forecasts[index]
        if forecast is None:
            return True, 0.0
        return False, -(forecast.rank if by_rank and forecast.rank is not None else forecast.mean)

    return sorted(range(len(forecasts)), key=key)


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete answer.

    Attributes:
        headers: By their names in lower case.
    """

    status: int
    headers: dict[str, str]
    body: bytes


async def post_json(app: ASGIApp, path: str, body: bytes) -> Reply:
    """The application's answer to one POST; cancelling it cancels the request.

    Raises:
        FarsightError: The application returned without an answer.
        Exception: Any error that the application raised.
    """
    status: int | None = None
    headers: dict[str, str] = {}
    parts: list[bytes] = []

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            headers.update((name.decode("latin-1"), value.decode("latin-1")) for name, value in message["headers"])
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    await app(_scope(path, body), _receive(body), send)
    if status is None:
        raise FarsightError(f"the application gave no answer to POST {path}")
    return Reply(status, {name.lower(): value for name, value in headers.items()}, b"".join(parts))


def _scope(path: str, body: bytes) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [
            (b"host", b"batch"),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ],
        "client": None,
        "server": None,
    }


def _receive(body: bytes) -> Receive:
    """Sends the body, then blocks: this client never disconnects."""
    sent = False

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await asyncio.get_running_loop().create_future()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive
