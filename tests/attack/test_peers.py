"""A program of the same user that speaks garbage to every socket that the server's processes listen on."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgpack
import psutil

from tests.attack.victim import Victim

DEEP = b"\x91" * 100_000
FRAMES: list[bytes] = [
    b"",
    b"\xc1" * 64,
    DEEP,
    b"\xdd\xff\xff\xff\xff",  # an array of 2^32 - 1
    b"\xdb\xff\xff\xff\xff" + b"a" * 1000,  # a text of 4 GiB
    msgpack.packb(7),
    msgpack.packb([]),
    msgpack.packb([1, 2, 3, 4, 5]),
    msgpack.packb([None, "router", "submit", b"\xc1"]),
    msgpack.packb([0, "router", "submit", msgpack.packb([{"a": [1] * 1000}])]),
    msgpack.packb([0, "router", "__init__", b""]),
    msgpack.packb([0, "router", "stop", b""]),
    msgpack.packb([0, {"a": 1}, ["stop"], 3.5]),
    msgpack.packb([[1, 2], "supervisor", "scale", b"\x80"]),
    msgpack.packb([0, "nobody", "submit", b""]),
    msgpack.packb([0, "log-store", "append", msgpack.packb("x" * 100_000)]),
    msgpack.packb(["x" * 100_000, "log-store", "read", bytes(100_000)]),
    b"GET / HTTP/1.1\r\n\r\n",
]


AT_ONCE = 16
"""Peers that speak at the same time: each waits a moment for an answer that mostly does not come."""


def garbage(volume: float) -> Iterator[bytes]:
    """The same in every run of the same volume."""
    draw = random.Random(11)
    yield from FRAMES
    for _ in range(int(60 * volume)):
        frame = bytearray(draw.choice(FRAMES[5:]) * draw.randrange(1, 4))
        for _ in range(draw.randrange(1, 8)):
            frame[draw.randrange(len(frame))] = draw.randrange(256)
        yield bytes(frame)
    for _ in range(int(20 * volume)):
        yield draw.randbytes(draw.randrange(1, 4000))


def abstract_sockets(victim: Victim) -> list[bytes]:
    """Ours, of this server's processes."""
    inodes = set()
    for pid in set(victim.components().values()):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(link.readlink().name.removeprefix("socket:[").removesuffix("]"))
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    fields = [line.split() for line in lines]
    return [
        b"\0" + each[7][1:].encode()
        for each in fields
        if each[6] in inodes and each[7:][0:1] and "@farsight-" in each[7]
    ]


def send(family: int, address: object, data: bytes) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as peer:
        peer.settimeout(0.05)
        with contextlib.suppress(OSError):
            peer.connect(address)  # type: ignore[arg-type]
            peer.sendall(data)
            while peer.recv(65536):
                pass


def test_garbage_on_every_internal_socket(victim: Victim, volume: float) -> None:
    sockets = abstract_sockets(victim)
    assert sockets, "no component listens"
    with ThreadPoolExecutor(AT_ONCE) as peers:
        sent = [peers.submit(send, socket.AF_UNIX, address, data) for address in sockets for data in garbage(volume)]
    for each in sent:
        each.result()


def test_many_who_connect_and_say_nothing_are_no_harm(victim: Victim) -> None:
    address = abstract_sockets(victim)[0]
    waiting = []
    for _ in range(200):
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        peer.connect(address)
        peer.sendall(b"\xdb\x7f\xff\xff\xff")  # a text of 2 GiB begins
        waiting.append(peer)
    pids = set(victim.components().values())
    assert all(psutil.Process(pid).memory_info().rss < 4 << 30 for pid in pids)
    for peer in waiting:
        peer.close()


def test_garbage_on_every_port_of_health_and_metrics(victim: Victim) -> None:
    ports = {row["http_port"] for row in victim.server.get("/status")["actors"]} - {0}
    assert ports
    lies = [b"GET /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000000\r\n\r\n", struct.pack(">I", 1 << 31)]
    for port in ports:
        for data in [*FRAMES, *lies, b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n"]:
            send(socket.AF_INET, ("127.0.0.1", port), data)
