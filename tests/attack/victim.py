"""The server under attack: what must be the same after it, and a neighbour who is served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx
import psutil

from farsight.services.launch.launch import EMBEDDED_NAME
from tests.e2e.server import LONG_S, Server, wait_until

NEIGHBOUR_TOKENS = 200
"""Tokens of each of the neighbour's streams."""

SPARE_FILES = 16
"""Open files that may come and go with Ray's own business."""


def completion(**change: object) -> bytes:
    """The bytes of a request for a completion."""
    fields = {"model": EMBEDDED_NAME, "prompt": "hello", "max_tokens": 4, "ignore_eos": True, **change}
    return post("/v1/completions", json.dumps(fields).encode())


def post(path: str, body: bytes, **headers: str) -> bytes:
    given = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": str(len(body)), **headers}
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in given.items())
    return f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + body


@dataclass
class Victim:
    """A running server.

    Attributes:
        statuses: Answers to attackers by status; 0 is none.
    """

    server: Server
    statuses: Counter[int] = field(default_factory=Counter)
    _files: dict[int, int] = field(default_factory=dict)
    _pids: dict[str, int] = field(default_factory=dict)

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.server.port

    def connect(self, timeout_s: float = LONG_S) -> socket.socket:
        return socket.create_connection(self.address, timeout=timeout_s)

    async def exchange(self, data: bytes) -> bytes:
        """All that comes over one connection until the server closes it or nothing more is due."""
        reader, writer = await asyncio.open_connection(*self.address)
        try:
            writer.write(data)
            await writer.drain()
            return await reader.read()
        except OSError:
            return b""
        finally:
            writer.close()

    def count(self, reply: bytes) -> int:
        """The status of a reply, which is counted."""
        words = reply.split(b" ", 2)
        status = int(words[1]) if len(words) > 2 and reply.startswith(b"HTTP/") else 0
        self.statuses[status] += 1
        return status

    def components(self) -> dict[str, int]:
        """The process of each."""
        return {row["name"]: row["pid"] for row in self.server.get("/status")["actors"]}

    def remember(self) -> None:
        self.statuses.clear()
        self.server.wait_idle()
        self._pids = self.components()
        self._files = self._open_files()

    def half_closed(self) -> int:
        """HAProxy's connections whose other end is closed and which it has not closed itself."""
        found = 0
        for process in self.server.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name() == "haproxy":
                    found += sum(each.status == psutil.CONN_CLOSE_WAIT for each in process.net_connections("tcp"))
        return found

    def _open_files(self) -> dict[int, int]:
        return {pid: psutil.Process(pid).num_fds() for pid in set(self._pids.values())}

    def check_unharmed(self) -> None:
        """No answer of the server's own fault, no process replaced, no request, KV block or file left."""
        assert not [status for status in self.statuses if status >= 500], self.statuses
        self.server.wait_idle()
        assert self.components() == self._pids, "a process has died"

        def no_more_files() -> bool:
            return all(num <= self._files[pid] + SPARE_FILES for pid, num in self._open_files().items())

        wait_until(no_more_files, "files are left open")
        wait_until(lambda: not self.half_closed(), "the proxy keeps connections that one side has closed")
        assert [row["degraded"] for row in self.server.get("/status")["actors"] if row["degraded"]] == []

    @contextlib.contextmanager
    def neighbour(self) -> Iterator[None]:
        """Reads one stream after the other, each of which must come whole."""
        over = threading.Event()
        faults: list[str] = []
        numbers = [0]

        def read() -> None:
            body = {"model": EMBEDDED_NAME, "prompt": "a", "max_tokens": NEIGHBOUR_TOKENS, "ignore_eos": True}
            with httpx.Client(base_url=self.server.base_url, timeout=LONG_S) as client:
                while not over.is_set() or not numbers[0]:
                    fields = {**body, "stream": True, "stream_options": {"include_usage": True}}
                    try:
                        text = client.post("/v1/completions", json=fields).text
                    except httpx.HTTPError as error:
                        faults.append(repr(error))
                        return
                    events = [line for line in text.splitlines() if line.startswith("data: ")]
                    if events[-1:] != ["data: [DONE]"]:
                        faults.append(text[-300:])
                        return
                    usage = json.loads(events[-2][6:])["usage"]
                    if usage["completion_tokens"] != NEIGHBOUR_TOKENS:
                        faults.append(str(usage))
                    numbers[0] += 1

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(LONG_S)
        assert not faults, faults
        assert numbers[0] and not thread.is_alive(), "the neighbour was not served"
