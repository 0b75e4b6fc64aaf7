"""Components without Ray: all in one process, with peers that are plain objects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import CollectorRegistry

from actors.log.log_store import LogStore
from actors.runtime.component import ComponentContext
from actors.runtime.site import Site
from core.codec import decode, encode
from core.config.load import FarsightConfig
from core.config.log import LogConfig
from core.forecast import QUANTILES
from core.messages.log import (
    Artefact,
    ArtefactInfo,
    ArtefactList,
    ArtefactName,
    ArtefactReply,
    ExamplePage,
    FinishedBatch,
    FinishedRequest,
    FinishedRequests,
    ForecastRecord,
    ForecastRecords,
    LogPage,
    LogQuery,
    RequestTrace,
    RequestTraces,
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


async def append_traces(store: Any, *records: RequestTrace) -> None:
    assert await store.append_traces(encode(RequestTraces(records))) == b""


async def read_traces(store: Any, response_id: str) -> tuple[RequestTrace, ...]:
    return decode(await store.read_traces(encode(TraceQuery(response_id))), RequestTraces).records


async def append(store: Any, *records: FinishedRequest) -> None:
    assert await store.append(encode(FinishedRequests(records))) == b""


async def append_forecasts(store: Any, *records: ForecastRecord) -> None:
    assert await store.append_forecasts(encode(ForecastRecords(records))) == b""


async def read(store: Any, after_row: int = 0, limit: int = 1000) -> LogPage:
    return decode(await store.read(encode(LogQuery(after_row, limit))), LogPage)


async def read_ids(store: Any, after_row: int = 0, limit: int = 1000) -> list[str]:
    return [each.request_id for each in (await read(store, after_row, limit)).records]


async def read_examples(store: Any, after_row: int = 0, limit: int = 1000) -> ExamplePage:
    return decode(await store.read_examples(encode(LogQuery(after_row, limit))), ExamplePage)


async def example_ids(store: Any, after_row: int = 0, limit: int = 1000) -> list[str]:
    return [each.finished.request_id for each in (await read_examples(store, after_row, limit)).examples]


async def put(store: Any, *artefacts: Artefact) -> None:
    for each in artefacts:
        assert await store.put_artefact(encode(each)) == b""


async def set_current(store: Any, version: int | None, kind: str = "forest") -> None:
    assert await store.set_current(encode(ArtefactName(kind, version))) == b""


async def read_artefact(store: Any, version: int | None = None, kind: str = "forest") -> Artefact | None:
    return decode(await store.read_artefact(encode(ArtefactName(kind, version))), ArtefactReply).artefact


async def list_artefacts(store: Any) -> tuple[ArtefactInfo, ...]:
    return decode(await store.artefacts(), ArtefactList).artefacts


async def versions(store: Any, kind: str = "forest") -> tuple[list[int], int | None]:
    """Those that are kept, and the current one."""
    infos = [each for each in await list_artefacts(store) if each.kind == kind]
    return [each.version for each in infos], next((each.version for each in infos if each.current), None)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONG_S):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)
