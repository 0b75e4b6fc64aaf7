"""Runs the requests of a batch against an application with limited concurrency and keeps each result."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from starlette.types import ASGIApp

from core.errors import FarsightError
from services.api.batches.lines import BatchLine, LineResult
from services.api.batches.order import Foresee, LongestFirst
from services.api.batches.sender import LineSender, RetryPolicy
from services.batch.progress import ProgressStore

DEFAULT_CONCURRENCY = 64
GROUP_LINES = 32
GROUP_S = 0.5
"""Results are written to disk in groups: at most this many, or those of this many seconds."""


async def run_batch(
    app: ASGIApp,
    lines: Sequence[BatchLine],
    store: ProgressStore,
    *,
    concurrency: int = DEFAULT_CONCURRENCY,
    on_done: Callable[[int, int], None],
    retry: RetryPolicy | None = None,
    foresee: Foresee | None = None,
) -> None:
    """Runs each line without a result once; when it returns, the store holds all results.

    Args:
        concurrency: Most requests in flight at once; >= 1.
        on_done: Called with the number of finished lines and the number of failures among them, earlier runs
        included, whenever more results are on disk.
        foresee: Forecasts lines, of which the longest begin first; None keeps their order.

    Raises:
        ServiceStalled: The service answered no line for the whole retry time of one.
        FarsightError: Results cannot be written.
    """
    pending = LongestFirst([each for each in enumerate(lines) if each[1].custom_id not in store], foresee)
    results: asyncio.Queue[LineResult | None] = asyncio.Queue(GROUP_LINES)
    sender = LineSender(app, retry or RetryPolicy())

    async def work() -> None:
        while (numbered := await pending.take()) is not None:
            await results.put(await sender.send(numbered[1]))

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


def _first(group: BaseExceptionGroup[FarsightError]) -> FarsightError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, FarsightError)
    return error
