"""The way of finished requests from an ingress replica to the log."""

from __future__ import annotations

import asyncio
from collections import deque

from actors.peer import Peer, PeerLost
from core.codec import encode
from core.messages import FinishedRequest, FinishedRequests

LOG_S = 0.2
"""How often they go ..."""

MAX_UNLOGGED = 20_000
"""... and how many may wait; beyond them the oldest are lost."""


class RequestLog:
    """Keeps records until the log store has them: what is sent twice is written once."""

    def __init__(self, log_store: Peer) -> None:
        self._log_store = log_store
        self._records: deque[FinishedRequest] = deque(maxlen=MAX_UNLOGGED)

    def add(self, record: FinishedRequest) -> None:
        self._records.append(record)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOG_S)
            records = tuple(self._records)
            if not records:
                continue
            try:
                await self._log_store.call("append", encode(FinishedRequests(records)))
            except PeerLost:
                continue
            for record in records:
                if self._records and self._records[0] is record:  # else it fell out at the end of the queue
                    self._records.popleft()
