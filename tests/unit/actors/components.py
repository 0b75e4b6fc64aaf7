"""Components without Ray: all in one process, with peers that are plain objects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import CollectorRegistry

from farsight.actors.calls.log_store import LogStoreCalls
from farsight.actors.log.log_store import LogStore
from farsight.actors.runtime.component import ComponentContext
from farsight.actors.runtime.peer import Site
from farsight.core.config.learning import LogConfig
from farsight.core.config.load import FarsightConfig
from farsight.core.forecast import QUANTILES
from farsight.core.messages.log import (
    Artefact,
    ArtefactInfo,
    ArtefactName,
    BatchPage,
    ExamplePage,
    FinishedBatch,
    FinishedRequest,
    ForecastRecord,
    LogPage,
    LogQuery,
    LogRecords,
    RequestTrace,
    TraceQuery,
)

LONG_S = 120.0
"""Only so that nothing hangs for ever: the limit of pytest says less."""


def component_context(
    name: str, local: dict[str, Any] | None = None, *, restarts: int = 0, **log: Any
) -> ComponentContext:
    """For the component ``name``; ``log`` are settings of the log."""
    config = FarsightConfig(log=LogConfig(**log))
    site = Site(config, "", "fused")
    return ComponentContext(name, site, restarts, site.peers(local), CollectorRegistry())


@asynccontextmanager
async def opened(**log: Any) -> AsyncIterator[LogStore]:
    """A log store that has started; ``log`` are its settings."""
    store = LogStore(component_context("log-store", **log))
    await store.start()
    try:
        yield store
    finally:
        await store.stop()


def finished(request_id: str, output_len: int = 7, finish_reason: str = "stop") -> FinishedRequest:
    return FinishedRequest(request_id, "0", 1, 5, output_len, 100, finish_reason, 1.7e9 + 0.1, 0.1 + 0.2, 1.5)


def forecast_record(request_id: str, mean: float = 7.5, features: bytes = b"\0\xff") -> ForecastRecord:
    quantiles = tuple(mean + level for level in QUANTILES)
    return ForecastRecord(request_id, 1.7e9 - 0.1, "forest", 3, mean, quantiles, None, "v1", features)


def finished_batch(batch_id: str, generation_len: int = 30) -> FinishedBatch:
    return FinishedBatch(batch_id, "0", 4, 17, generation_len, 28, 0.1 + 0.2, 0.7, 1.7e9 + 0.3)


def artefact(version: int, data: bytes = b"\0tree\xff", kind: str = "forest") -> Artefact:
    return Artefact(kind, version, 1.7e9 + 0.1, 0.1 + 0.2, 500, "of tests", data)


def trace(response_id: str, request_id: str = "i-0", part: str = "0", decisions: bytes = b"\0\xff") -> RequestTrace:
    who = (f"{response_id}/{request_id}/{part}", request_id, 1, b"salt", "scheduler-0")
    return RequestTrace(*who, attempt=0, ended=True, num_left_out=2, decisions=decisions)


async def append_traces(store: LogStoreCalls, *records: RequestTrace) -> None:
    await store.append(LogRecords(traces=records))


async def read_traces(store: LogStoreCalls, response_id: str) -> tuple[RequestTrace, ...]:
    return (await store.read_traces(TraceQuery(response_id))).records


async def append(store: LogStoreCalls, *records: FinishedRequest) -> None:
    await store.append(LogRecords(records))


async def append_forecasts(store: LogStoreCalls, *records: ForecastRecord) -> None:
    await store.append(LogRecords(forecasts=records))


async def read(store: LogStoreCalls, after_row: int = 0, limit: int = 1000) -> LogPage:
    return await store.read(LogQuery(after_row, limit))


async def read_ids(store: LogStoreCalls, after_row: int = 0, limit: int = 1000) -> list[str]:
    return [each.request_id for each in (await read(store, after_row, limit)).records]


async def read_examples(store: LogStoreCalls, after_row: int = 0, limit: int = 1000) -> ExamplePage:
    return await store.read_examples(LogQuery(after_row, limit))


async def example_ids(store: LogStoreCalls, after_row: int = 0, limit: int = 1000) -> list[str]:
    return [each.finished.request_id for each in (await read_examples(store, after_row, limit)).examples]


async def append_batches(store: LogStoreCalls, *records: FinishedBatch) -> None:
    await store.append(LogRecords(batches=records))


async def read_batches(store: LogStoreCalls, after_row: int = 0, limit: int = 1000) -> BatchPage:
    return await store.read_batches(LogQuery(after_row, limit))


def num_counted(store: LogStore, kind: str = "requests") -> float | None:
    return store.context.registry.get_sample_value("farsight:log_records_total", {"kind": kind})


async def put(store: LogStoreCalls, *artefacts: Artefact) -> None:
    for each in artefacts:
        await store.put_artefact(each)


async def set_current(store: LogStoreCalls, version: int | None, kind: str = "forest") -> None:
    await store.set_current(ArtefactName(kind, version))


async def read_artefact(store: LogStoreCalls, version: int | None = None, kind: str = "forest") -> Artefact | None:
    return await store.read_artefact(ArtefactName(kind, version))


async def list_artefacts(store: LogStoreCalls) -> tuple[ArtefactInfo, ...]:
    return (await store.artefacts()).artefacts


async def versions(store: LogStoreCalls, kind: str = "forest") -> tuple[list[int], int | None]:
    """Those that are kept, and the current one."""
    infos = [each for each in await list_artefacts(store) if each.kind == kind]
    return [each.version for each in infos], next((each.version for each in infos if each.current), None)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONG_S):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)
