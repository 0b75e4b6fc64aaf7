"""Ports for servers under test."""

from __future__ import annotations

import os
import random
import socket

FIRST_PORT = 20_000
NUM_PORTS = 1_000
"""Of each process of pytest-xdist. All lie below those that services reserve and outgoing connections get."""


def free_port() -> int:
    """A port that nobody has, and that no test in another process is given."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 10
    first = FIRST_PORT + worker * NUM_PORTS
    while True:
        port = random.SystemRandom().randrange(first, first + NUM_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
