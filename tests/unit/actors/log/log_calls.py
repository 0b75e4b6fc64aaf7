"""Calls to a log store that its tests share."""

from __future__ import annotations

from actors.log.log_store import LogStore
from core.messages.log import (
    BatchPage,
    FinishedBatch,
    FinishedBatches,
    LogQuery,
)


def num_counted(store: LogStore, kind: str = "requests") -> float | None:
    return store.context.registry.get_sample_value("farsight:log_records_total", {"kind": kind})


async def append_batches(store: LogStore, *records: FinishedBatch) -> None:
    await store.append_batches(FinishedBatches(records))


async def read_batches(store: LogStore, after_row: int = 0, limit: int = 1000) -> BatchPage:
    return await store.read_batches(LogQuery(after_row, limit))
