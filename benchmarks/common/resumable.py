"""Clients of resumable streams, each of which asks for one answer after the other and reconnects when it is cut off."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.common.streams import LONG_S, Stream, stream_body

RETRY_S = 0.05
AGAIN = (429, 502, 503, 504)


BodyOf = Callable[[int, int], dict[str, Any]]


@dataclass
class Client:
    """One client; ``done`` are its complete answers, ``gaps`` its pauses between events as (began, seconds).

    Attributes:
        path: Where it asks.
        body_of: What it asks, by its index and its number of tokens.
    """

    index: int
    num_tokens: int
    path: str = "/v1/completions"
    body_of: BodyOf = stream_body
    done: list[Stream] = field(default_factory=list)
    gaps: list[tuple[float, float]] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)
    num_resumed: int = 0
    failures: list[str] = field(default_factory=list)
    _heard_at: float = 0.0
    _numbers: list[int] = field(default_factory=list)

    async def run(self, session: aiohttp.ClientSession, stop: asyncio.Event) -> None:
        """Until it is stopped, and the answer that is under way has come to its end."""
        while not stop.is_set() and not self.failures:
            self._heard_at, self._numbers = time.monotonic(), []
            stream = Stream()
            await self._read_all(session, stream)
            if self._numbers != list(range(1, len(self._numbers) + 1)):
                self.failures.append(f"events {self._numbers}")
            self.done.append(stream)

    async def _read_all(self, session: aiohttp.ClientSession, stream: Stream) -> None:
        stream_id = last_id = ""
        while not stream.done and not self.failures:
            asked = "GET" if stream_id else "POST"
            address = f"/v1/streams/{stream_id}" if stream_id else self.path
            headers = {} if stream_id else {"X-Farsight-Resumable": "true"}
            headers |= {"Last-Event-ID": last_id} if last_id else {}
            body = None if stream_id else self.body_of(self.index, self.num_tokens)
            self.num_resumed += bool(stream_id)
            try:
                async with session.request(asked, address, json=body, headers=headers) as reply:
                    self.statuses[reply.status] = self.statuses.get(reply.status, 0) + 1
                    if reply.status in AGAIN:
                        error = await reply.json()
                        assert set(error["error"]) == {"message", "type", "param", "code"}
                        await asyncio.sleep(RETRY_S)
                        continue
                    if reply.status != 200:
                        self.failures.append(f"{asked} {address}: {reply.status} {await reply.text()}")
                        return
                    stream_id = reply.headers["X-Farsight-Stream"]
                    last_id = await self._read(reply, stream, last_id)
            except aiohttp.ClientError:
                last_id = f"{stream_id}-{self._numbers[-1]}" if self._numbers else ""
                await asyncio.sleep(RETRY_S)

    async def _read(self, reply: aiohttp.ClientResponse, stream: Stream, last_id: str) -> str:
        event_id = ""
        async for line in reply.content:
            text = line.decode().rstrip("\n")
            if text.startswith("id: "):
                event_id = text.removeprefix("id: ")
            elif text.startswith("data: "):
                if not event_id:
                    self.failures.append(f"an event without an id: {text}")
                    return last_id
                stream.take(text)
                self._note(event_id)
                last_id, event_id = event_id, ""
        return last_id

    def _note(self, event_id: str) -> None:
        now = time.monotonic()
        self.gaps.append((self._heard_at, now - self._heard_at))
        self._heard_at = now
        self._numbers.append(int(event_id.rpartition("-")[2]))

    @property
    def num_read(self) -> int:
        """Events of the answer that is under way."""
        return len(self._numbers)

    def longest_pause_s(self, began: float, ended: float) -> float:
        """The longest pause that ended in that time."""
        return max((gap_s for at, gap_s in self.gaps if began <= at + gap_s <= ended), default=0.0)


@asynccontextmanager
async def clients(
    base_url: str, number: int, num_tokens: int, path: str = "/v1/completions", body_of: BodyOf = stream_body
) -> AsyncIterator[list[Client]]:
    """Clients at work; at the end each finishes the answer that it reads."""
    connector = aiohttp.TCPConnector(limit=0)
    found = [Client(index, num_tokens, path, body_of) for index in range(number)]
    stop = asyncio.Event()
    async with aiohttp.ClientSession(base_url, connector=connector, timeout=aiohttp.ClientTimeout(None)) as session:
        tasks = [asyncio.create_task(client.run(session, stop)) for client in found]
        try:
            yield found
            stop.set()
            async with asyncio.timeout(LONG_S):
                await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
