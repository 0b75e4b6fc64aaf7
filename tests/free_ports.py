"""Ports for servers under test."""

from __future__ import annotations

import functools
import itertools
import random
import socket
from collections.abc import Iterator

LOOPBACK = "127.0.0.1"
FIRST_PORT = 20_000
BLOCK_SIZE = 500
NUM_BLOCKS = 20
"""All lie between those that Ray gives its workers and those that services reserve or outgoing connections get."""


def free_port() -> int:
    """A free port that no other test is given soon, in this process or in another one."""
    for port in itertools.islice(_own_ports(), BLOCK_SIZE):
        with socket.socket() as probe:
            if _bind(probe, port):
                return port
    raise RuntimeError(f"all ports of the block are taken, one of them is {next(_own_ports())}")


@functools.cache
def _own_ports() -> Iterator[int]:
    """A block of this process, in turn for ever: who asks for two ports before either is bound gets two.

    The first port of the block is bound until the process ends; that keeps others away who run tests on this machine.
    """
    for block in random.SystemRandom().sample(range(NUM_BLOCKS), NUM_BLOCKS):
        first = FIRST_PORT + block * BLOCK_SIZE
        claim = socket.socket()
        if _bind(claim, first):
            claim.detach()
            ports = range(first + 1, first + BLOCK_SIZE)
            return itertools.cycle(random.SystemRandom().sample(ports, len(ports)))
        claim.close()
    raise RuntimeError(f"{NUM_BLOCKS} others have taken all blocks of ports")


def _bind(probe: socket.socket, port: int) -> bool:
    try:
        probe.bind((LOOPBACK, port))
    except OSError:
        return False
    return True
