"""Ports that one service has for itself."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest

from core.errors import FarsightError
from services.proxy import ports
from services.proxy.ports import BLOCK_SIZE, FIRST_PORT, NUM_BLOCKS, free_ports, reserved_ports

HOLDER = """
from services.proxy.ports import reserved_ports
with reserved_ports() as ports:
    print(ports[0], flush=True)
    input()
"""


def test_services_that_start_at_once_share_no_port() -> None:
    """In processes of their own, since that is where they live."""
    holders = [
        subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    try:
        firsts = [int(holder.stdout.readline()) for holder in holders if holder.stdout is not None]
    finally:
        for holder in holders:
            holder.communicate("\n", timeout=200)
    assert len({(first - FIRST_PORT) // BLOCK_SIZE for first in firsts}) == 3


def three_blocks() -> int:
    """Where three free blocks begin, below the ports that Ray gives its workers."""
    for first in range(4_000, 9_000, 3 * BLOCK_SIZE):
        with contextlib.suppress(FarsightError):
            return free_ports(range(first, first + 3 * BLOCK_SIZE, BLOCK_SIZE), 3)[0]
    raise AssertionError("too many programs listen on this machine")


def test_they_are_given_back_and_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    # Services that run beside this test keep theirs.
    begin = three_blocks()
    monkeypatch.setattr(ports, "FIRST_PORT", begin)
    monkeypatch.setattr(ports, "NUM_BLOCKS", 3)
    with ExitStack() as stack:
        blocks = [stack.enter_context(reserved_ports()) for _ in range(3)]
        assert len({port for block in blocks for port in block}) == 3 * (BLOCK_SIZE - 1)
        with pytest.raises(FarsightError, match=f"no free block of 150 ports between {begin} and {begin + 449}"):
            stack.enter_context(reserved_ports())
    with reserved_ports():
        pass


def test_the_port_of_the_service_itself_is_not_among_them() -> None:
    wanted = FIRST_PORT + 7 * BLOCK_SIZE + 1
    for _ in range(5 * NUM_BLOCKS):
        with reserved_ports(avoid=wanted) as found:
            assert wanted not in found


def test_a_port_that_somebody_listens_on_is_not_free() -> None:
    with reserved_ports() as found, socket.socket() as taken:
        taken.bind(("127.0.0.1", free_ports(found, 1)[0]))
        taken.listen()
        assert taken.getsockname()[1] not in free_ports(found, 3)
        with pytest.raises(FarsightError, match="2 free ports are needed, 0 were found"):
            free_ports([taken.getsockname()[1]], 2)
