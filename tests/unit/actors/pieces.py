"""Pieces without Ray: all in one process, with peers that are plain objects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry

from actors.piece import PieceContext
from actors.site import Site
from core.codec import decode, encode
from core.config import FarsightConfig, LogConfig
from core.messages import FinishedRequest, FinishedRequests, LogPage, LogQuery

LONG_S = 30.0


def piece_context(name: str, local: dict[str, Any] | None = None, **log: Any) -> PieceContext:
    """For the piece ``name``; ``log`` are settings of the log."""
    config = FarsightConfig(log=LogConfig(**log))
    site = Site(config, "", "fused")
    return PieceContext(name, site, 0, site.peers(local), CollectorRegistry())


def finished(request_id: str, output_len: int = 7, finish_reason: str = "stop") -> FinishedRequest:
    return FinishedRequest(request_id, "0", 1, 5, output_len, 100, finish_reason, 1.7e9 + 0.1, 0.1 + 0.2, 1.5)


async def append(store: Any, *records: FinishedRequest) -> None:
    assert await store.append(encode(FinishedRequests(records))) == b""


async def read(store: Any, after_row: int = 0, limit: int = 1000) -> LogPage:
    return decode(await store.read(encode(LogQuery(after_row, limit))), LogPage)


async def read_ids(store: Any, after_row: int = 0, limit: int = 1000) -> list[str]:
    return [each.request_id for each in (await read(store, after_row, limit)).records]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONG_S):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)
