"""A web server of a few lines that sends exactly the bytes that a test wants, well or hostile."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


def http(body: bytes = b"", *headers: str, status: int = 200, length: int | None = None) -> bytes:
    """An answer; ``length`` in place of the body's own, -1 for none."""
    lines = [f"HTTP/1.1 {status} X", *headers]
    if length != -1:
        lines.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def moved(to: str, status: int = 302) -> bytes:
    return http(b"", f"Location: {to}", status=status)


class PictureHost:
    """
    Attributes:
        answers: By path: bytes, or what writes them.
        heads: The head of each request that came, as text.
        names: The server names that TLS clients asked for.
        num_open: Connections that are open.
    """

    def __init__(self) -> None:
        self.answers: dict[str, bytes | Answer] = {}
        self.heads: list[str] = []
        self.names: list[str | None] = []
        self.num_open = 0
        self.port = 0
        self._tasks: set[asyncio.Task[None]] = set()  # Nothing else refers to an answer that waits for ever.

    @contextlib.asynccontextmanager
    async def serving(self, tls: ssl.SSLContext | None = None, port: int = 0) -> AsyncIterator[PictureHost]:
        if tls is not None:
            tls.sni_callback = lambda _, name, __: self.names.append(name)
        server = await asyncio.start_server(self._serve, "127.0.0.1", port, ssl=tls)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.num_open += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.heads.append(head)
            answer = self.answers.get(head.split(" ")[1], http(status=404))
            if isinstance(answer, bytes):
                writer.write(answer)
            else:
                await answer(writer)
            await writer.drain()
        except (OSError, EOFError, asyncio.CancelledError):
            pass  # the client has left, as it should where an answer is hostile; or the test is over
        finally:
            self._tasks.remove(task)
            self.num_open -= 1
            writer.close()


async def endless(writer: asyncio.StreamWriter) -> None:
    writer.write(http(length=-1))
    while True:
        writer.write(bytes(1 << 16))
        await writer.drain()


async def endless_chunks(writer: asyncio.StreamWriter) -> None:
    writer.write(http(b"", "Transfer-Encoding: chunked", length=-1))
    while True:
        writer.write(b"1000\r\n" + bytes(4096) + b"\r\n")
        await writer.drain()


async def endless_head(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 X\r\n")
    while True:
        writer.write(b"X-More: " + b"a" * 4000 + b"\r\n")
        await writer.drain()


async def dripping(writer: asyncio.StreamWriter) -> None:
    """A byte from time to time, so that no single wait is long."""
    writer.write(http(length=1000))
    while True:
        writer.write(b"a")
        await writer.drain()
        await asyncio.sleep(0.02)


async def silent(writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()
