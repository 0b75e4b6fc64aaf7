"""Many streams at once from a real server, and what each of them got."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from farsight.services.launch.launch import EMBEDDED_NAME

LONG_S = 300.0
MAX_TRIES = 5

# Prompts of the embedded model whose first 400 tokens, many of them text, nowhere hang on rounding in float32: no
# logits closer than 1e-3, no drawn number closer than 3e-5 to the next token's share.
_GREEDY = (
    *(0, 21, 24, 26, 32, 36, 39, 40, 45, 53, 58, 60, 77, 78, 116, 119),
    *(121, 133, 140, 141, 158, 159, 163, 165, 167, 174, 175, 177, 181, 192, 195, 196),
)
_SAMPLED = (
    *(1, 21, 23, 24, 26, 27, 37, 39, 46, 48, 49, 66, 72, 74, 76, 77),
    *(84, 91, 92, 101, 104, 107, 111, 115, 121, 139, 153, 162, 174, 177, 192, 196),
)


@dataclass
class Stream:
    """One client: what it has got so far, and when; ``broken`` if the connection ended before the stream did."""

    texts: list[str] = field(default_factory=list)
    arrived_at: list[float] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    errors: list[Any] = field(default_factory=list)
    num_tokens: int | None = None
    done: bool = False
    broken: bool = False

    @property
    def ended(self) -> bool:
        return bool(self.reasons) or self.done or self.broken

    @property
    def outcome(self) -> tuple[str, list[str], list[Any], int | None, bool]:
        """The results that must not depend on deaths meanwhile."""
        return "".join(self.texts), self.reasons, self.errors, self.num_tokens, self.done

    def take(self, line: str) -> None:
        """One line of the event stream."""
        if not line.startswith("data: "):
            return
        if line == "data: [DONE]":
            self.done = True
            return
        chunk = json.loads(line.removeprefix("data: "))
        if "error" in chunk:
            self.errors.append(chunk["error"])
            return
        for choice in chunk["choices"]:
            self.texts.append(choice["text"] if "text" in choice else choice["delta"].get("content") or "")
            self.arrived_at.append(time.monotonic())
            self.reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
        if chunk.get("usage"):
            self.num_tokens = chunk["usage"]["completion_tokens"]


class Streams:
    """Streams of one server; each has a prompt of its own, every other one is sampled."""

    def __init__(self, session: aiohttp.ClientSession, number: int, num_tokens: int) -> None:
        self.session = session
        self.each = [Stream() for _ in range(number)]
        bodies = [stream_body(index, num_tokens) for index in range(number)]
        self._tasks = [
            asyncio.create_task(self._read(stream, body)) for stream, body in zip(self.each, bodies, strict=True)
        ]

    async def _read(self, stream: Stream, body: dict[str, Any]) -> None:
        try:
            async with self.session.post("/v1/completions", json=body) as reply:
                assert reply.status == 200, await reply.text()
                async for line in reply.content:
                    stream.take(line.decode().strip())
        except aiohttp.ClientError:
            stream.broken = True

    async def all_midway(self, num_chunks: int = 3) -> bool:
        """Waits until each has got so many chunks of text or has ended; returns whether none has ended by then."""
        await eventually(lambda: all(stream.ended or len(stream.texts) >= num_chunks for stream in self.each))
        return not any(stream.ended for stream in self.each)

    async def finish(self, timeout_s: float = LONG_S) -> list[Stream]:
        """Until all connections have closed."""
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*self._tasks)
        return self.each

    async def leave(self) -> None:
        """Closes what is still open."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def rows(self) -> dict[str, dict[str, Any]]:
        """The components in /status, by name."""
        async with self.session.get("/status") as reply:
            return {row["name"]: row for row in (await reply.json())["actors"]}


@asynccontextmanager
async def open_streams(base_url: str, number: int, num_tokens: int) -> AsyncIterator[Streams]:
    """Begins the streams; clients of streams that still run at the end disconnect."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(base_url, connector=connector, timeout=aiohttp.ClientTimeout(None)) as session:
        streams = Streams(session, number, num_tokens)
        try:
            yield streams
        finally:
            await streams.leave()


@asynccontextmanager
async def streams_midway(base_url: str, number: int, num_tokens: int) -> AsyncIterator[Streams]:
    """Streams that have all begun and not ended; repeated if the machine was too busy for that."""
    for _ in range(MAX_TRIES):
        async with open_streams(base_url, number, num_tokens) as streams:
            if await streams.all_midway():
                yield streams
                return
    raise AssertionError(f"{MAX_TRIES} times some streams had ended before all had begun")


async def eventually(condition: Callable[[], bool]) -> None:
    """Waits for it; TimeoutError if it does not come true."""
    async with asyncio.timeout(LONG_S):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


def stream_body(index: int, num_tokens: int) -> dict[str, Any]:
    """What the client of that index asks."""
    if index % 2:
        number = _SAMPLED[index // 2 % len(_SAMPLED)]
        sampling: dict[str, Any] = {"temperature": 0.8, "seed": number}
    else:
        number = _GREEDY[index // 2 % len(_GREEDY)]
        sampling = {"temperature": 0}
    rng = random.Random(number)
    return {
        "model": EMBEDDED_NAME,
        "prompt": [rng.randrange(4, 256) for _ in range(rng.randint(30, 50))],
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **sampling,
    }
