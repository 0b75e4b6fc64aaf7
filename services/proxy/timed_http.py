"""An HTTP connection that waits for its client only so long, and bounds how many an address may have.

uvicorn alone waits for ever: for a head, for a body, for a client that reads nothing. The limits hold where clients
connect directly, to Ray Serve's proxy or to an ingress replica; HAProxy has the same ones in its own configuration.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import socket
from collections import Counter
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, cast

from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from farsight.core.config.server import ServerConfig
from farsight.services.proxy.haproxy_config import error_json

LIMITS_VARIABLE = "FARSIGHT_CONNECTION_LIMITS"
"""Environment variable with the limits as JSON, for Ray Serve's own proxy."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """``[server]`` settings of the same names, in seconds and connections; ``per_address`` 0 is no limit."""

    head_s: float
    body_s: float
    idle_s: float
    write_s: float
    per_address: int

    @classmethod
    def of(cls, server: ServerConfig) -> ConnectionLimits:
        return cls(
            server.head_timeout_s,
            server.body_timeout_s,
            server.idle_timeout_s,
            server.write_timeout_s,
            server.max_connections_per_address,
        )

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


class TimedHttp(HttpToolsProtocol):
    """One connection.

    Args:
        counts: Open connections by address, shared by all connections of the server.
    """

    def __init__(self, limits: ConnectionLimits, counts: Counter[str], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.timeout_keep_alive = limits.idle_s  # type: ignore[assignment]
        self._limits = limits
        self._counts = counts
        self._address = ""
        self._patience: asyncio.TimerHandle | None = None
        self._begun = False  # bytes of a request have come whose head is not complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        _bound_writing(transport, self._limits.write_s)
        self._address = self.client[0] if self.client else ""
        self._counts[self._address] += 1
        most = self._limits.per_address
        if most and self._counts[self._address] > most:
            self._refuse(429, f"Your address has {most} connections open, the limit of this server.")
            return
        self._wait(self._limits.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._wait(None)
        self._counts[self._address] -= 1
        if not self._counts[self._address]:
            del self._counts[self._address]

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._reads_body:
            self._wait(self._limits.body_s)
        elif self._begun and self._patience is None:
            self._wait(self._limits.head_s)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begun = True

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._begun = False
        self._wait(None)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._wait(None)

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP; uvicorn's own reply is plain text."""
        self._refuse(400, "")

    @property
    def _reads_body(self) -> bool:
        cycle = self.cycle
        return cycle is not None and cycle.more_body and not cycle.response_complete

    def _wait(self, seconds: float | None) -> None:
        """From now on for so long; without an end where nothing is due from the client."""
        if self._patience is not None:
            self._patience.cancel()
        self._patience = None if seconds is None else self.loop.call_later(seconds, self._give_up)

    def _give_up(self) -> None:
        self._patience = None
        if self._reads_body and self.flow.read_paused:
            self._wait(self._limits.body_s)  # what is missing is our own reading
        elif self._begun or (self._reads_body and not self.cycle.response_started):
            self._refuse(408, "")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        self.transport.write(raw_reply(status, error_json(status, message).encode()))
        self.transport.close()


def raw_reply(status: int, body: bytes, headers: str = "") -> bytes:
    """Returns the last answer of a connection, with JSON.

    Args:
        headers: Further lines of the head, each with its line end.
    """
    head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n{headers}"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


def _bound_writing(transport: asyncio.BaseTransport, seconds: float) -> None:
    """Has the system end a connection whose client has taken nothing of what was sent for so long; on Linux."""
    connection = transport.get_extra_info("socket")
    if connection is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * seconds))


def time_proxy() -> None:
    """Lets the uvicorn server that this process starts next, Ray Serve's proxy, keep the limits in the environment."""
    settings = os.environ.get(LIMITS_VARIABLE)
    if settings:
        limits, counts = ConnectionLimits(**json.loads(settings)), Counter[str]()

        def connect(**arguments: Any) -> asyncio.Protocol:
            return TimedHttp(limits, counts, **arguments)

        cast(dict[str, Any], HTTP_PROTOCOLS)["auto"] = connect
