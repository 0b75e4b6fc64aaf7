"""Tells whether an ingress replica lives, from outside the event loop that it watches.

A thread with an event loop of its own answers, on a port of the loopback interface: HAProxy's checks and ``/health``
need not wait behind the work of a burst. The thread answers for the loop that serves requests: once that has not turned
for ``HUNG_S``, the replica counts as dead, though its process lives.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from farsight.services.api.answers.replies import Health
from farsight.services.api.errors import ApiError, unhealthy
from farsight.services.api.readiness import Readiness
from farsight.services.proxy.haproxy_config import CHECK_PATH, HEALTH_PATH, LIVENESS_FOLDER, READY_PATH
from farsight.services.proxy.timed_http import raw_reply

BEAT_S = 0.25
HUNG_S = 10.0
"""Seconds without a turn after which a loop is not busy but stuck: in a burst a turn takes tens of milliseconds."""

SWITCH_S = 0.001
"""Seconds that a busy event loop keeps the interpreter from the thread, which needs it a dozen times for an answer."""

REQUEST_S = 5.0
MAX_REQUEST_BYTES = 8192
MAX_CONNECTIONS = 256
"""Bounds of callers: seconds to send a request, bytes of a request, and callers at once."""


class Liveness:
    """Watches the event loop that calls ``start``, until ``stop``.

    Args:
        healthy: Whether requests can be taken; called in the thread, so it may only read.
        now: A monotonic clock, in seconds.
        readiness: Whether a Supervisor answers and whether a drain is on; without it there is neither.
    """

    def __init__(
        self,
        healthy: Callable[[], bool],
        now: Callable[[], float] = time.monotonic,
        readiness: Readiness | None = None,
    ) -> None:
        self._healthy = healthy
        self._readiness = readiness or Readiness()
        self._now = now
        self._turned_at = now()
        self._beat: asyncio.TimerHandle | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._num_open = 0
        self.port = 0

    @property
    def alive(self) -> bool:
        """Whether the watched loop has turned within ``HUNG_S``."""
        return self._now() - self._turned_at < HUNG_S

    async def start(self) -> int:
        """Starts the thread; returns its port."""
        self._watch()
        sys.setswitchinterval(SWITCH_S)
        listens: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        watched = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, args=(watched, listens), name="liveness", daemon=True)
        self._thread.start()
        await listens
        return self.port

    def stop(self) -> None:
        """Ends the thread; harmless where nothing was started."""
        if self._beat is not None:
            self._beat.cancel()
        if self._thread is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _watch(self) -> None:
        self._turned_at = self._now()
        self._beat = asyncio.get_running_loop().call_later(BEAT_S, self._watch)

    def _run(self, watched: asyncio.AbstractEventLoop, listens: asyncio.Future[None]) -> None:
        self._loop = loop = asyncio.SelectorEventLoop()  # whatever the process uses elsewhere
        try:
            server = loop.run_until_complete(
                asyncio.start_server(self._answer, "127.0.0.1", 0, limit=MAX_REQUEST_BYTES)
            )
        except OSError as error:
            watched.call_soon_threadsafe(listens.set_exception, error)
            loop.close()
            return
        self.port = server.sockets[0].getsockname()[1]
        watched.call_soon_threadsafe(listens.set_result, None)
        loop.run_forever()
        server.close()
        calls = asyncio.all_tasks(loop)
        for call in calls:
            call.cancel()
        if calls:
            loop.run_until_complete(asyncio.wait(calls))
        loop.run_until_complete(server.wait_closed())
        loop.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers the one question of a connection; closes one that asks none, or too much, without an answer."""
        self._num_open += 1
        try:
            if self._num_open <= MAX_CONNECTIONS:
                async with asyncio.timeout(REQUEST_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self.reply(head))
                writer.close()
        except (TimeoutError, OSError, EOFError, asyncio.LimitOverrunError):
            return
        finally:
            self._num_open -= 1
            if not writer.is_closing():
                writer.transport.abort()

    def reply(self, head: bytes) -> bytes:
        """Returns the answer to a request that begins with ``head``."""
        method, _, rest = head.partition(b" ")
        path = rest.split(b" ", 1)[0].partition(b"?")[0].decode("latin-1")
        if method != b"GET":
            error = ApiError("Wrong HTTP method; this address takes GET.", code="method_not_allowed")
            return _http(405, error.body(), "Allow: GET\r\n")
        if path == CHECK_PATH and self.alive:
            return _http(200, {"status": "ok"})
        if path == HEALTH_PATH and self.alive and self._healthy() and self._readiness.is_supervised:
            return _http(200, Health().model_dump())
        if path == READY_PATH:
            problem = self._readiness.problem(healthy=self.alive and self._healthy())
            return _http(200, Health().model_dump()) if problem is None else _refused(problem)
        if path in (CHECK_PATH, HEALTH_PATH):
            return _refused(unhealthy())
        return _http(404, ApiError(f"There is no {path}.", code="not_found").body())


def _refused(error: ApiError) -> bytes:
    return _http(error.status, error.body(), "".join(f"{name}: {value}\r\n" for name, value in error.headers.items()))


def _http(status: int, body: dict[str, object], headers: str = "") -> bytes:
    return raw_reply(status, json.dumps(body).encode(), headers)


def publish(port: int, replica_id: str, directory: Path) -> None:
    """Tells the proxy of this node the port of the replica's ``Liveness``.

    Args:
        replica_id: As Ray Serve has it; the end of the name that it gives to the replica in HAProxy's configuration.
        directory: Directory of the proxy's files.
    """
    folder = directory / LIVENESS_FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    unfinished = folder / f".{replica_id}"
    unfinished.write_text(str(port))
    unfinished.rename(folder / replica_id)
