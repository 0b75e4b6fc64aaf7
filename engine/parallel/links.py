"""Connections between rank 0 and the other ranks of a replica: one TCP connection each, closed with its process.

Orders are small and go one way; the large data, activations, goes through ``exchange``. The end of a connection tells
either side that the other has died, whether it computes or idles. Without Ray, the other ranks are child processes.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from farsight.core.errors import RankLost
from farsight.engine.parallel.mesh import Mesh

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("<Q")
_HELLO = struct.Struct("<32sI")
_HELLO_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Ticket:
    """Where rank 0 waits for the others, and the key that lets them in (32 characters)."""

    host: str
    port: int
    key: str


class Link:
    """One end of a connection; either direction belongs to one thread at a time."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)
        self._connection = connection

    def send(self, data: bytes) -> None:
        """Raises RankLost if the other side is gone."""
        try:
            self._connection.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise RankLost(f"a rank of the replica is gone: {error}") from error

    def receive(self) -> bytes:
        """Receives the next message; raises RankLost if the other side is gone."""
        try:
            (length,) = _LENGTH.unpack(_read(self._connection, _LENGTH.size))
            return _read(self._connection, length)
        except OSError as error:
            raise RankLost(f"a rank of the replica is gone: {error}") from error

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        """Closes the connection, which wakes the threads that wait at either end."""
        with contextlib.suppress(OSError):  # the other side was first
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def join(ticket: Ticket, rank: int) -> Link:
    """Connects a rank to rank 0.

    Raises:
        RankLost: No rank 0 listens there.
    """
    try:
        connection = socket.create_connection((ticket.host, ticket.port), timeout=_HELLO_TIMEOUT_S)
        connection.sendall(_HELLO.pack(ticket.key.encode(), rank))
    except OSError as error:
        raise RankLost(f"rank 0 does not answer at {ticket.host}:{ticket.port}: {error}") from error
    return Link(connection)


class Gathering:
    """Rank 0 waits for the others.

    Args:
        size: Ranks of the replica, rank 0 among them.
        host: Address to listen on.
    """

    def __init__(self, size: int, host: str = "127.0.0.1") -> None:
        self._size = size
        self._listener = socket.create_server((host, 0))
        self.ticket = Ticket(host, self._listener.getsockname()[1], secrets.token_hex(16))

    def wait(self, timeout_s: float) -> list[Link]:
        """Accepts the connections of ranks 1, 2 ...; a peer without the key is turned away.

        Raises:
            RankLost: A rank did not connect in time.
        """
        links: dict[int, Link] = {}
        deadline = time.monotonic() + timeout_s
        with self._listener:
            while len(links) < self._size - 1:
                self._listener.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    connection, _ = self._listener.accept()
                except TimeoutError as error:
                    missing = sorted(set(range(1, self._size)) - set(links))
                    raise RankLost(f"ranks {missing} have not come within {timeout_s:.0f} s") from error
                rank = self._greet(connection)
                if rank in links:  # it has died and come back: its orders are lost
                    raise RankLost(f"rank {rank} has come twice")
                if rank is not None:
                    links[rank] = Link(connection)
        return [links[rank] for rank in sorted(links)]

    def close(self) -> None:
        """Stops listening."""
        self._listener.close()

    def _greet(self, connection: socket.socket) -> int | None:
        """Returns the peer's rank; None if it lacks the key."""
        connection.settimeout(_HELLO_TIMEOUT_S)
        try:
            key, rank = _HELLO.unpack(_read(connection, _HELLO.size))
        except OSError:
            connection.close()
            return None
        if not hmac.compare_digest(key, self.ticket.key.encode()) or not 1 <= rank < self._size:
            connection.close()
            return None
        return int(rank)


@dataclass(frozen=True, slots=True)
class Ranks:
    """The other ranks of the replica that this process is rank 0 of.

    Attributes:
        gathering: Accepts their connections.
        on_lost: Called from a separate thread when a rank has gone, whether a step runs or not.
    """

    mesh: Mesh
    gathering: Gathering
    on_lost: Callable[[RankLost], object]


def _read(connection: socket.socket, length: int) -> bytes:
    data = bytearray(length)
    view, at = memoryview(data), 0
    while at < length:
        count = connection.recv_into(view[at:])
        if count == 0:
            raise ConnectionResetError("the connection has ended")
        at += count
    return bytes(data)


_END_TIMEOUT_S = 60.0

RANK_MODULE = "farsight.engine.parallel"
"""The module that a rank runs: ``python -m RANK_MODULE HOST PORT RANK PARENT``, the key on standard input."""


class LocalRanks:
    """Starts ranks 1, 2 ... of a replica whose rank 0 is this process. One at a time in a process.

    Args:
        module: As ``RANK_MODULE``.

    Attributes:
        ranks: For ``build_worker``.
        processes: The other ranks, from rank 1 on.
    """

    def __init__(self, mesh: Mesh, module: str = RANK_MODULE) -> None:
        self._module = module
        self._closing = False
        gathering = Gathering(mesh.size)
        self.ranks = Ranks(mesh, gathering, self._lost)
        self.processes = [self._spawn(gathering, rank) for rank in range(1, mesh.size)]

    def _spawn(self, gathering: Gathering, rank: int) -> subprocess.Popen[bytes]:
        ticket = gathering.ticket
        root = Path(__file__).absolute().parents[3]
        command = [sys.executable, "-m", self._module, ticket.host, str(ticket.port), str(rank), str(os.getpid())]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=root)
        assert process.stdin is not None
        process.stdin.write(ticket.key.encode())  # not an argument: every user of the machine sees those
        process.stdin.close()
        return process

    def _lost(self, error: RankLost) -> None:
        if not self._closing:
            logger.error("%s", error)

    def close(self) -> None:
        """Ends the processes and leaves torch's process group."""
        import torch.distributed as dist

        self._closing = True
        self.ranks.gathering.close()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait(_END_TIMEOUT_S)
        if dist.is_initialized():
            dist.destroy_process_group()
