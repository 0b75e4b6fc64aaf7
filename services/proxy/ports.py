"""Reserves ports of this machine for one service, and keeps a server of Ray Serve's on the loopback interface."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterable, Iterator
from types import ModuleType

from farsight.core.errors import FarsightError

FIRST_PORT = 30_000
BLOCK_SIZE = 150
NUM_BLOCKS = 18
"""All blocks lie below the ports that Linux gives to outgoing connections (32768 and up by default)."""

LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def reserved_ports(avoid: int = 0) -> Iterator[range]:
    """A block of ports that no other Farsight on this machine gets until the context ends, or the process does.

    The port before the block stays bound, which keeps other Farsight processes away. Other programs may listen on
    ports of the block.

    Args:
        avoid: A port that is needed for another purpose.

    Raises:
        FarsightError: Every block is taken.
    """
    with contextlib.ExitStack() as stack:
        # Start at a random block: processes of a killed service may hold its ports a moment longer.
        for block in random.SystemRandom().sample(range(NUM_BLOCKS), NUM_BLOCKS):
            first = FIRST_PORT + block * BLOCK_SIZE
            if avoid not in range(first, first + BLOCK_SIZE) and _bind(stack.enter_context(socket.socket()), first):
                yield range(first + 1, first + BLOCK_SIZE)
                return
    last = FIRST_PORT + NUM_BLOCKS * BLOCK_SIZE - 1
    raise FarsightError(f"there is no free block of {BLOCK_SIZE} ports between {FIRST_PORT} and {last}")


def free_ports(among: Iterable[int], number: int) -> list[int]:
    """The first of these ports without a listener.

    Raises:
        FarsightError: Too few ports are free.
    """
    found: list[int] = []
    for port in among:
        if len(found) == number:
            break
        with socket.socket() as probe:
            if _bind(probe, port):
                found.append(port)
    if len(found) < number:
        raise FarsightError(f"{number} free ports are needed, {len(found)} were found")
    return found


def _bind(probe: socket.socket, port: int) -> bool:
    try:
        probe.bind((LOOPBACK, port))
    except OSError:
        return False
    return True


_ANY_PORT = "127.0.0.1:0"


def keep_on_loopback(replica: ModuleType) -> None:
    """Has Ray Serve's server for calls between deployments, which takes pickles, listen on the loopback interface.

    There is one deployment, so it gets no call. Ray binds it to ``[::]`` and has no setting for its address.

    Args:
        replica: ``ray.serve._private.replica``, before it starts the server.

    Raises:
        AttributeError: This version of Ray binds the server in another way.
    """
    bind = replica.add_port_to_grpc_server

    def bind_to_loopback(server: object, address: str) -> object:
        return bind(server, _ANY_PORT)

    replica.add_port_to_grpc_server = bind_to_loopback  # type: ignore[attr-defined]
