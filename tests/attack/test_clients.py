"""Clients that leave, crawl, hurry, never end and never begin; assertions on speed are in ``benchmarks.front_door``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import resource
import socket
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from benchmarks.burst import judge
from benchmarks.front_door import SHAPES
from farsight.services.launch.launch import EMBEDDED_NAME
from tests.attack.victim import Victim, completion, post
from tests.e2e.server import LONG_S, wait_until

CLOSE = {"Connection": "close"}


def streamed(prompt: str, max_tokens: int) -> bytes:
    fields = {"model": EMBEDDED_NAME, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    return post("/v1/completions", json.dumps(fields).encode(), **CLOSE)


async def test_two_thousand_connections_of_which_half_leave(victim: Victim, volume: float) -> None:
    """Wherever they are: in the middle of the head, of the body, before the answer, within it."""
    draw = random.Random(7)
    stay: list[bytes] = []

    async def one(index: int) -> None:
        data = streamed(f"prompt {index}", 40)
        if index % 2:
            stay.append(await victim.exchange(data))
            return
        _, writer = await asyncio.open_connection(*victim.address)
        with contextlib.suppress(OSError):
            writer.write(data[: draw.randrange(len(data))] if index % 4 else data)
            await writer.drain()
            await asyncio.sleep(draw.random() * 0.3)
        writer.transport.abort()

    total = int(2000 * volume)
    await asyncio.gather(*(one(index) for index in range(total)))
    outcomes = [judge(reply, stream=True) for reply in stay]
    assert len(outcomes) == total // 2 and all(right for _, right in outcomes), outcomes[:5]
    assert {outcome for outcome, _ in outcomes} == {"200"}
    for reply in stay:
        victim.count(reply)


async def test_readers_of_one_byte_a_second(victim: Victim, volume: float) -> None:
    """Their sockets hold almost nothing, so what they do not read waits at the server; a while, and they leave."""
    loop = asyncio.get_running_loop()
    sockets = []
    for index in range(int(200 * volume)):
        crawler = socket.socket()
        crawler.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        crawler.setblocking(False)
        await loop.sock_connect(crawler, victim.address)
        await loop.sock_sendall(crawler, streamed(f"prompt {index}", 600))
        sockets.append(crawler)
    try:
        for _ in range(5):
            received = await asyncio.gather(*(loop.sock_recv(each, 1) for each in sockets))
            assert all(received)
            await asyncio.sleep(1.0)
        good = await victim.exchange(post("/v1/completions", completion().partition(b"\r\n\r\n")[2], **CLOSE))
        assert victim.count(good) == 200
    finally:
        for each in sockets:
            each.close()


async def test_five_hundred_pipelined_requests_are_answered_in_their_order(victim: Victim, volume: float) -> None:
    total = int(500 * volume)
    asked = b"".join(
        f"GET /v1/models/model-{index} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() if index % 5 else completion()
        for index in range(total)
    )
    reader, writer = await asyncio.open_connection(*victim.address)
    writer.write(asked)
    for index in range(total):
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), LONG_S)
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        if victim.count(head) == 404:
            assert f"model-{index}'" in body["error"]["message"]
        else:
            assert index % 5 == 0 and body["usage"]["completion_tokens"] == 4
    writer.close()
    assert set(victim.statuses) == {200, 404}


BODIES = {
    "length": b"Content-Length: 1000000\r\n\r\n{",
    "two lengths": b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}",
    "chunks": b"Transfer-Encoding: chunked\r\n\r\n5\r\n[1,2,\r\n",
    # What a proxy takes of it before it stops reading.
    "endless chunks": b"Transfer-Encoding: chunked\r\n\r\n" + (b"10000\r\n" + b"[" * 65536 + b"\r\n") * 100,
}


async def test_bodies_without_end(victim: Victim, volume: float) -> None:
    """What stands still gets 408 after its time, what is too long 413, what contradicts itself 400."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"

    async def one(kind: str) -> tuple[str, int]:
        reader, writer = await asyncio.open_connection(*victim.address)
        status = 0
        with contextlib.suppress(OSError):
            writer.write(head + BODIES[kind])
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            status = victim.count(await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), LONG_S))
        writer.close()
        return kind, status

    number = max(4, int(40 * volume))
    found = Counter(await asyncio.gather(*(one(kind) for kind in BODIES for _ in range(number))))
    allowed = {"length": {408}, "chunks": {408}, "two lengths": {400}, "endless chunks": {0, 408, 413}}
    for kind, status in found:  # a close may overtake the answer to one that still sends
        assert status in allowed[kind], found


@pytest.mark.parametrize("shape", ["words", "token ids", "unknown fields", "not JSON"])
async def test_six_prompts_of_four_megabytes_at_once(victim: Victim, shape: str) -> None:
    body = SHAPES[shape]()
    replies = await asyncio.gather(*(victim.exchange(post("/v1/completions", body, **CLOSE)) for _ in range(6)))
    assert {victim.count(reply) for reply in replies} <= {400, 413, 429}, victim.statuses
    assert all(judge(reply, stream=False)[1] for reply in replies)


def test_half_open_connections_are_given_up(victim: Victim, volume: float) -> None:
    """While thousands say nothing, or half a line, others are answered."""
    with _files(20_000) as most:
        total = min(int(5000 * volume), most - 1000)
        waiting = [victim.connect() for _ in range(total)]
        for each in waiting[::2]:
            each.sendall(b"POST /v1/comp")
        with httpx.Client(base_url=victim.server.base_url, timeout=LONG_S) as client:
            assert client.get("/health").status_code == 200
            body = {"model": EMBEDDED_NAME, "prompt": "hello", "max_tokens": 2}
            assert client.post("/v1/completions", json=body).status_code == 200
        for each in waiting:
            reply = b"".join(iter(lambda each=each: each.recv(4096), b""))  # type: ignore[misc]
            assert not reply or victim.count(reply) == 408, reply
            each.close()


@contextlib.contextmanager
def _files(wanted: int) -> Iterator[int]:
    """As many open files as the system allows this process, at most so many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    try:
        yield max(soft, most)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_no_head_brings_the_server_down(victim: Victim) -> None:
    heads = [
        b"\0" * 5000,
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET " + b"/" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 5000 + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 200_000 + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFF\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    ]
    replies = await asyncio.gather(*(asyncio.wait_for(victim.exchange(head), LONG_S) for head in heads))
    for reply in replies:
        assert not reply or 300 <= victim.count(reply) < 500 or victim.count(reply) == 501, reply[:200]
    wait_until(victim.server.answers, "it does not answer")
