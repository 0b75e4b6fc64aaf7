"""Ingress replicas that share a store of streams, over a backend that makes tokens when a test says so."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from farsight.actors.log.stream_store import StoredStreams
from farsight.core.errors import FarsightError
from farsight.core.messages.resumable import StreamChanges, StreamFound, StreamName, StreamState, StreamVerdicts
from farsight.core.messages.tokens import TokenDelta
from farsight.core.request import Request
from farsight.services.api.generation import Generation, PromptText
from farsight.services.api.requests import generation_of
from farsight.services.api.schemas import ChatCompletionRequest, CompletionRequest
from farsight.services.api.streams.live import EventWriter, LiveStream
from farsight.services.api.streams.manager import StreamManager
from farsight.services.api.text.prompts import PromptEncoder
from tests.unit.services.api.api_support import LONG_S, MODEL, ScriptedBackend

KEY = "the key"
MANY_BYTES = 10**7


class PacedBackend(ScriptedBackend):
    """Token ``i`` of each output has the text ``"<i> "``; each needs a permit, wherever a request goes on."""

    def __init__(self, permits: int = 0) -> None:
        super().__init__()
        self.permits = asyncio.Semaphore(permits)
        self.continued: list[tuple[int, ...]] = []
        self.failure: Exception | None = None

    def allow(self, num: int) -> None:
        for _ in range(num):
            self.permits.release()

    async def stream(
        self, request: Request, text: PromptText | None = None, key: str = ""
    ) -> AsyncGenerator[TokenDelta, None]:
        if self.failure is not None:
            raise self.failure
        self.num_opened += 1
        self.continued.append(tuple(request.output_ids))
        most = request.sampling.max_new_tokens
        try:
            for number in range(len(request.output_ids), most):
                await self.permits.acquire()
                reason = "length" if number + 1 == most else None
                yield TokenDelta("r", 0, number, (number,), f"{number} ", reason)
        finally:
            self.num_closed += 1


class ShelfStore:
    """The store's state machine in this process; ``away`` makes it as good as dead."""

    def __init__(self, tenant_bytes: int = MANY_BYTES) -> None:
        self.now = 1000.0
        self.away = False
        self._tenant_bytes = tenant_bytes
        self.streams = StoredStreams(tenant_bytes, MANY_BYTES, self.now - 100)

    def die(self) -> None:
        """A successor begins with nothing."""
        self.streams = StoredStreams(self._tenant_bytes, MANY_BYTES, self.now)

    def _check(self) -> None:
        if self.away:
            raise FarsightError("the store is away")

    async def change(self, changes: StreamChanges) -> StreamVerdicts:
        await asyncio.sleep(0)
        self._check()
        return self.streams.change(changes, self.now)

    async def find(self, name: StreamName) -> StreamFound:
        await asyncio.sleep(0)
        self._check()
        return self.streams.find(name.stream_id, self.now)

    async def take(self, name: StreamName) -> StreamState | None:
        await asyncio.sleep(0)
        self._check()
        return self.streams.take(name.stream_id, self.now)


@dataclass
class Reader:
    """A client: its events as (id, data), and what ended it."""

    events: list[tuple[str, str]] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    error: Exception | None = None

    @property
    def last_number(self) -> int:
        return int(self.events[-1][0].partition("-")[2]) if self.events else 0

    @property
    def data(self) -> list[str]:
        return [data for _, data in self.events]

    async def leave(self) -> None:
        assert self.task is not None
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def finish(self) -> Reader:
        assert self.task is not None
        async with asyncio.timeout(LONG_S):
            await self.task
        return self


def events_of(data: bytes) -> list[tuple[str, str]]:
    """(id, data) of each event; the id is empty without one."""
    found = []
    for each in filter(None, data.decode().split("\n\n")):
        lines = dict(line.split(": ", 1) for line in each.split("\n"))
        found.append((lines.get("id", ""), lines["data"]))
    return found


class Replica:
    """One ingress replica."""

    def __init__(self, store: ShelfStore, backend: PacedBackend, encoder: PromptEncoder, resume_s: float) -> None:
        self.manager = StreamManager(store, resume_s)
        self.backend = backend
        self._encoder = encoder
        self._running: asyncio.Task[None] | None = asyncio.create_task(self.manager.run())

    async def start(self, **fields: Any) -> LiveStream:
        generation = await self.generation(**fields)
        return self.manager.start(self.backend, generation, KEY, "tenant")

    async def generation(self, *, chat: bool = False, **fields: object) -> Generation:
        shape = {"model": MODEL, "stream": True, "temperature": 0, "max_tokens": 8}
        if chat:
            body = ChatCompletionRequest.model_validate(
                {**shape, "messages": [{"role": "user", "content": "hi"}], **fields}
            )
        else:
            body = CompletionRequest.model_validate({**shape, "prompt": "hello", **fields})  # type: ignore[assignment]
        made = await generation_of(body, self.backend.model, self._encoder)
        return made.named(b"", str)

    async def resume(self, stream_id: str, key: str = KEY) -> LiveStream:
        return await self.manager.resume(stream_id, key, self.backend)

    def read(self, live: LiveStream, after: int = 0) -> Reader:
        reader = Reader()
        writer = EventWriter(live.state.stream_id, live.state.record, self._encoder.texts)

        async def run() -> None:
            try:
                async with contextlib.aclosing(live.read(after, writer)) as events:
                    async for data in events:
                        reader.events += events_of(data)
            except Exception as error:
                reader.error = error

        reader.task = asyncio.create_task(run())
        return reader

    async def die(self) -> None:
        """Nothing of it is heard any more; what it ran, the workers abort."""
        if self._running is None:
            return
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        self._running = None
        for live in list(self.manager._streams.values()):
            self.manager._lose(live)


@dataclass
class HttpSide:
    """Makes ingress replicas over one store."""

    store: ShelfStore
    backend: PacedBackend
    encoder: PromptEncoder
    replicas: list[Replica] = field(default_factory=list)

    def replica(self, resume_s: float = LONG_S) -> Replica:
        self.replicas.append(Replica(self.store, self.backend, self.encoder, resume_s))
        return self.replicas[-1]


@contextlib.asynccontextmanager
async def http_side(encoder: PromptEncoder, tenant_bytes: int = MANY_BYTES) -> AsyncIterator[HttpSide]:
    side = HttpSide(ShelfStore(tenant_bytes), PacedBackend(), encoder)
    try:
        yield side
    finally:
        for replica in side.replicas:
            await replica.die()
