"""Runs the requests of a batch against an application with limited concurrency and keeps each result."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.types import ASGIApp

from core.errors import FarsightError
from services.batch.asgi import Reply, post_json
from services.batch.lines import BatchLine, LineResult, answered, unsent
from services.batch.progress import ProgressStore

DEFAULT_CONCURRENCY = 64
GROUP_LINES = 32
GROUP_S = 0.5
"""Results are written to disk in groups: at most this many, or those of this many seconds."""

_RETRIED = (429, 503)

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


async def run_batch(
    app: ASGIApp,
    lines: Sequence[BatchLine],
    store: ProgressStore,
    *,
    concurrency: int = DEFAULT_CONCURRENCY,
    on_done: Callable[[int, int], None],
    retry: RetryPolicy | None = None,
) -> None:
    """Runs each line without a result once; when it returns, the store holds all results.

    Args:
        concurrency: Most requests in flight at once; >= 1.
        on_done: Called with the number of finished lines and the number of failures among them, earlier runs
        included, whenever more results are on disk.

    Raises:
        ServiceStalled: The service answered no line for the whole retry time of one.
        FarsightError: Results cannot be written.
    """
    pending = iter([line for line in lines if line.custom_id not in store])
    results: asyncio.Queue[LineResult | None] = asyncio.Queue(GROUP_LINES)
    sender = _Sender(app, retry or RetryPolicy())

    async def work() -> None:
        for line in pending:  # All workers share the iterator, so each line goes to one worker.
            await results.put(await sender.send(line))

    async def work_all() -> None:
        async with asyncio.TaskGroup() as workers:
            for _ in range(concurrency):
                workers.create_task(work())
        await results.put(None)

    try:
        async with asyncio.TaskGroup() as both:
            both.create_task(work_all())
            both.create_task(_keep_all(results, store, on_done))
    except* FarsightError as group:
        raise _first(group) from None


class _Sender:
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


async def _keep_all(
    results: asyncio.Queue[LineResult | None], store: ProgressStore, on_done: Callable[[int, int], None]
) -> None:
    """Writes results until it gets None. If cancelled, it drops the last group, whose requests then run again."""
    ended = False
    while not ended:
        group: list[LineResult] = []
        ended = await _collect(results, group)
        if group:
            await asyncio.to_thread(store.append, group)  # A slow disk must not delay the requests.
            on_done(store.num_done, store.num_failed)


async def _collect(results: asyncio.Queue[LineResult | None], group: list[LineResult]) -> bool:
    """Fills a group; returns whether it holds the last result."""
    result = await results.get()
    try:
        async with asyncio.timeout(GROUP_S):
            while result is not None:
                group.append(result)
                if len(group) == GROUP_LINES:
                    return False
                result = await results.get()
    except TimeoutError:
        return False
    return True


def _retry_after_s(reply: Reply) -> float:
    """Retry-After in seconds; 0 if the header is missing or is a date, which this service does not send."""
    value = reply.headers.get("retry-after", "")
    return float(value) if value.isdecimal() else 0.0


def _message(reply: Reply) -> str:
    try:
        return str(json.loads(reply.body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "no reason given"


def _first(group: BaseExceptionGroup[FarsightError]) -> FarsightError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, FarsightError)
    return error
