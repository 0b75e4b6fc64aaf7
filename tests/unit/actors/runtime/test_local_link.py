"""Messages over the socket of a node, on real sockets and both event loops."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from farsight.actors.calls.failures import RemoteError
from farsight.actors.runtime import remote
from farsight.actors.runtime.remote import LinkLost, LocalLink, connect, listen
from farsight.core.errors import MessageError
from tests.unit.actors.components import LONG_S


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner


class Receiver:
    """What is listened to: answers with the message, slowly or not at all."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []
        self.gate = asyncio.Event()

    async def answer(self, component: str, method: str, data: bytes) -> Any:
        self.seen.append(data)
        if method == "refuse":
            raise MessageError(f"{component}.field", 3, "something else")
        if method == "break":
            raise type("Local", (Exception,), {})("mine")
        if method == "wait":
            await self.gate.wait()
        return data


@asynccontextmanager
async def linked(receiver: Receiver) -> AsyncIterator[tuple[LocalLink, str]]:
    """A connection to who is listened to, and the address."""
    address, server = await listen(receiver.answer)
    link = await connect(address)
    assert link is not None and server is not None
    yield link, address
    link.close()
    server.close()


def test_answers_and_refusals(runner: asyncio.Runner) -> None:
    async def check() -> None:
        async with linked(Receiver()) as (link, _):
            big = os.urandom(3_000_000)
            assert await link.call("p", "echo", big) == big
            assert await link.call("p", "echo", b"") == b""
            with pytest.raises(MessageError, match=r"p\.field: got 3, expected something else"):
                await link.call("p", "refuse", b"")
            with pytest.raises(RemoteError, match="Local: mine"):
                await link.call("p", "break", b"")

    runner.run(check())


def test_calls_overtake_each_other_but_messages_do_not(runner: asyncio.Runner) -> None:
    async def check() -> None:
        receiver = Receiver()
        async with linked(receiver) as (link, _):
            waiting = asyncio.create_task(link.call("p", "wait", b"first"))
            cancelled = asyncio.create_task(link.call("p", "wait", b"second"))
            await asyncio.sleep(0)
            cancelled.cancel()
            sent = [b"%d" % i for i in range(100)]
            assert await asyncio.gather(*(link.call("p", "echo", data) for data in sent)) == sent
            assert receiver.seen == [b"first", b"second", *sent]
            receiver.gate.set()
            assert await waiting == b"first"

    runner.run(check())


def test_calls_under_way_end_with_the_connection(runner: asyncio.Runner) -> None:
    async def check() -> None:
        async with linked(Receiver()) as (link, _):
            waiting = asyncio.create_task(link.call("p", "wait", b""))
            await asyncio.sleep(0.01)
            link.close()
            with pytest.raises(LinkLost):
                await waiting
            assert not link.open
            with pytest.raises(LinkLost):
                await link.call("p", "echo", b"")

    runner.run(check())


def test_nobody_listens(runner: asyncio.Runner) -> None:
    async def check() -> None:
        assert await connect("\0farsight-nobody") is None

    runner.run(check())


def test_another_user_is_turned_away(runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        receiver = Receiver()
        address, server = await listen(receiver.answer)
        monkeypatch.setattr(remote, "_peer_uid", lambda connection: os.getuid() + 1)
        caller = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        caller.setblocking(False)
        caller.connect(address)
        _, link = await asyncio.get_running_loop().create_unix_connection(LocalLink, sock=caller)
        with pytest.raises(LinkLost):  # the connection stands before it can be looked at
            await asyncio.wait_for(link.call("p", "echo", b"x"), LONG_S)
        link.close()
        assert receiver.seen == []
        assert await connect(address) is None, "what another user listens to is not trusted either"
        assert server is not None
        server.close()

    runner.run(check())
