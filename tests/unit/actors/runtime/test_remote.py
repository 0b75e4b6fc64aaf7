"""Which way messages to an actor take, and in which order; without Ray."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from farsight.actors.runtime import remote
from farsight.actors.runtime.peer import PeerLost
from farsight.actors.runtime.remote import LinkLost, RemoteActor


class Link:
    """Takes messages until it is broken."""

    def __init__(self) -> None:
        self.open = True
        self.taken: list[bytes] = []

    async def call(self, component: str, method: str, data: bytes) -> bytes:
        if not self.open:
            raise LinkLost(component)
        self.taken.append(data)
        return data


class Actor(RemoteActor):
    """Answers on this node or another one, through Ray after a while."""

    def __init__(self, node_id: str) -> None:
        super().__init__("host")
        self._node_id = node_id
        self._handle = object()
        self.called: list[str] = []

    async def call(self, method: str, *args: Any) -> Any:
        self._handle = self._handle or object()
        self.called.append(method)
        await asyncio.sleep(0.01)
        return (self._node_id, "address") if method == "local_address" else args[-1]


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> list[Link]:
    made: list[Link] = []

    async def connect(address: str) -> Link:
        await asyncio.sleep(0.01)
        made.append(Link())
        return made[-1]

    context = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr(remote, "connect", connect)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    return made


async def test_no_message_overtakes_those_that_wait_for_the_link(links: list[Link]) -> None:
    actor = Actor("here")
    sent: list[bytes] = []
    answers = []
    for number in range(200):  # some before the link is there, some in the moments after, some later
        sent.append(b"%d" % number)
        answers.append(asyncio.create_task(actor.send("component", "method", sent[-1])))
        await asyncio.sleep(0.0002)
    assert await asyncio.gather(*answers) == sent
    assert [link.taken for link in links] == [sent]
    assert actor.called == ["local_address"]


async def test_the_message_after_a_loss_finds_the_successor(links: list[Link]) -> None:
    actor = Actor("here")
    await actor.send("component", "method", b"1")
    links[0].open = False
    actor._handle = object()
    assert await actor.send("component", "method", b"2") == b"2"
    assert [each.taken for each in links] == [[b"1"], [b"2"]]


async def test_an_actor_elsewhere_is_called_through_ray_and_asked_once(links: list[Link]) -> None:
    actor = Actor("there")
    assert await actor.send("component", "method", b"1") == b"1"
    assert await actor.send("component", "method", b"2") == b"2"
    assert actor.called == ["local_address", "call", "call"]
    assert not links


async def test_a_call_under_way_ends_with_the_link(links: list[Link]) -> None:
    actor = Actor("here")
    await actor.send("component", "method", b"1")

    async def break_off(component: str, method: str, data: bytes) -> bytes:
        raise LinkLost(component)

    links[0].call = break_off  # type: ignore[method-assign]
    with pytest.raises(PeerLost):
        await actor.send("component", "method", b"2")


async def test_what_is_due_at_once_and_does_not_come_is_a_lost_peer(
    links: list[Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The component hangs in one message; it goes on answering others."""
    actor = Actor("here")
    await actor.send("component", "submit", b"0")

    async def never(component: str, method: str, data: bytes) -> bytes:
        return await asyncio.Future()

    monkeypatch.setattr(links[0], "call", never)
    monkeypatch.setattr(remote, "REPLY_S", 0.01)
    with pytest.raises(PeerLost, match="component has not answered submit"):
        await actor.send("component", "submit", b"1")
    poll = asyncio.create_task(actor.send("component", "poll_tokens", b"2", long=True))
    await asyncio.sleep(0.05)
    assert not poll.done(), "it may take as long as there is nothing to tell"
    poll.cancel()
