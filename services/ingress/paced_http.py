"""The HTTP server of an ingress replica, which begins new requests at a pace that leaves the event loop free."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections import Counter
from typing import Any, cast

from uvicorn.config import HTTP_PROTOCOLS

from farsight.core.config.server import ServerConfig
from farsight.core.errors import CapacityError
from farsight.services.api.middleware import ErrorShapes, LoopPace
from farsight.services.api.readiness import Reason, Refused, asks_for_tokens
from farsight.services.proxy.timed_http import ConnectionLimits, TimedHttp

ACCEPTED_PER_TURN = 64
"""Most connections taken from the listening socket in one turn of the event loop: some 5 ms."""

REFUSED_PER_TURN = 16
"""Most requests refused in one turn before they are parsed: some 4 ms."""

BACKLOG = 4096
"""Connections that may wait to be accepted. Beyond it the kernel drops them, and clients try again after seconds."""

_DESCRIPTORS = "/proc/self/fd"

logger = logging.getLogger(__name__)


class PacedHttp(TimedHttp):
    """One connection. The first bytes of a POST wait until the pace admits them; a request under way goes on.

    So a request that waits has cost no more than its connection: it is neither parsed nor routed, and Ray Serve does
    not know of it. Reading is paused meanwhile, so at most one read's bytes are kept. Other methods are not held:
    questions about the status go ahead of the queue.
    """

    def __init__(self, pace: LoopPace, server: PacedServer, *args: Any, **kwargs: Any) -> None:
        super().__init__(server.limits, server.counts, *args, **kwargs)
        self._pace = pace
        self._server = server
        self._app = self.app
        self._held: list[bytes] = []
        self._rests = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.server is not None:
            self._server.listens_on(self.server[1])

    def data_received(self, data: bytes) -> None:
        if self._held:
            self._held.append(data)  # read before the pause
        elif self._begins(data):
            self._held.append(data)
            self._unset_keepalive_if_required()  # the connection is not idle
            self._wait(None)  # the client waits for this server, not the server for the client
            error = self._server.refusal(data)
            if error is None:
                self.app, pace = self._app, self._pace
            else:
                self.app = ErrorShapes(Refused(self._app, error, self._server.max_body_bytes))
                pace = self._server.refusals
            pace.submit(self._begin)
            if self._held:
                self._rests = True
                self.transport.pause_reading()
        else:
            super().data_received(data)

    def _begins(self, data: bytes) -> bool:
        return (self.cycle is None or self.cycle.response_complete) and data.startswith(b"POST ")

    def _begin(self) -> None:
        held, self._held = self._held, []
        if self.transport.is_closing():
            return
        if self._rests:
            self._rests = False
            self.transport.resume_reading()
        for data in held:
            super().data_received(data)

    def shutdown(self) -> None:
        """Begins the held request when the server stops listening, so that it is still answered."""
        self._begin()
        super().shutdown()


class PacedServer:
    """Makes the connections of a uvicorn server; when one comes, also accepts the others that wait.

    uvloop takes one connection from a listening socket in each turn of the event loop. In a burst a turn takes some
    10 ms: the socket's queue would fill, the kernel would drop further connections, and health checks would wait behind
    the queue.

    Args:
        reason: Called when the first bytes of a request for tokens come.

    Attributes:
        refusals: The pace of requests that are refused before they are parsed, apart from the pace of the others.
    """

    def __init__(
        self,
        pace: LoopPace,
        limits: ConnectionLimits,
        reason: Reason = lambda: None,
        max_body_bytes: int = ServerConfig().max_body_bytes,
    ) -> None:
        self.limits = limits
        self.max_body_bytes = max_body_bytes
        self.refusals = LoopPace(REFUSED_PER_TURN)
        self._reason = reason
        self.counts: Counter[str] = Counter()
        self._pace = pace
        self._listener: tuple[int, int] | None = None  # port and file descriptor
        self._arguments: dict[str, Any] = {}
        self._greetings: set[asyncio.Task[Any]] = set()

    def refusal(self, data: bytes) -> CapacityError | None:
        """Returns why a request that begins with ``data`` is refused at once; None if it is not."""
        return self._reason() if asks_for_tokens(data) else None

    def __call__(self, **arguments: Any) -> asyncio.Protocol:
        """Returns the protocol of an accepted connection; uvicorn calls this with a protocol's arguments."""
        self._arguments = arguments
        self._accept_others()
        return self._protocol()

    def listens_on(self, port: int | None) -> None:
        """Notes the port at which the server listens, as its connections tell it."""
        if port is None or (self._listener is not None and self._listener[0] == port):
            return
        descriptor = _find_listener(port)
        if descriptor is not None:
            self._listener = port, descriptor
            with _duplicate(descriptor) as listener:
                listener.listen(BACKLOG)

    def _protocol(self) -> asyncio.Protocol:
        return PacedHttp(self._pace, self, **self._arguments)

    def _accept_others(self) -> None:
        if self._listener is None:
            return
        port, descriptor = self._listener
        with contextlib.suppress(OSError), _duplicate(descriptor) as listener:
            if _listens(listener, port):
                for _ in range(ACCEPTED_PER_TURN):
                    self._greet(listener.accept()[0])  # BlockingIOError: there are no others
            else:
                self._listener = None

    def _greet(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        greeting = loop.create_task(loop.connect_accepted_socket(self._protocol, connection))
        self._greetings.add(greeting)
        greeting.add_done_callback(self._greeted)

    def _greeted(self, greeting: asyncio.Task[Any]) -> None:
        self._greetings.discard(greeting)
        if not greeting.cancelled() and greeting.exception() is not None:
            logger.warning("a connection was lost while it was accepted", exc_info=greeting.exception())


def pace_http(pace: LoopPace, limits: ConnectionLimits, reason: Reason, max_body_bytes: int) -> None:
    """Makes all uvicorn servers that this process starts later paced, such as Ray Serve's in an ingress replica."""
    # uvicorn takes the name of a protocol to import, or the protocol itself.
    cast(dict[str, Any], HTTP_PROTOCOLS)["auto"] = PacedServer(pace, limits, reason, max_body_bytes)


def _duplicate(descriptor: int) -> socket.socket:
    """Returns a second socket object for a descriptor. Raises OSError if it is not a socket."""
    duplicate = os.dup(descriptor)
    try:
        return socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise


def _find_listener(port: int) -> int | None:
    """Finds the descriptor of this process's socket that listens on the port; None where the system does not tell."""
    descriptors = os.listdir(_DESCRIPTORS) if os.path.isdir(_DESCRIPTORS) else []
    for descriptor in map(int, descriptors):
        with contextlib.suppress(OSError), _duplicate(descriptor) as candidate:
            if _listens(candidate, port):
                return descriptor
    return None


def _listens(candidate: socket.socket, port: int) -> bool:
    """Returns whether the candidate is a TCP socket that listens on the port."""
    if candidate.family not in (socket.AF_INET, socket.AF_INET6) or candidate.type != socket.SOCK_STREAM:
        return False
    listens = candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
    return listens and candidate.getsockname()[1] == port
