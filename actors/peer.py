"""How a piece speaks to another one, wherever that lives."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError

from actors.names import NAMESPACE, actor_name, host_of
from core.errors import FarsightError

LOOK_AGAIN_S = 0.05
"""How often a lost peer is looked for."""


class PeerLost(FarsightError):
    """The process of the piece is gone, or not there yet; whether it took the message is unknown."""


class Answering(Protocol):
    """A piece, as far as its peers are concerned."""

    async def answer(self, method: str, data: bytes) -> Any: ...


class Peer(Protocol):
    """One other piece."""

    async def call(self, method: str, data: bytes = b"") -> Any:
        """Its answer, usually ``bytes``; messages to the same peer arrive in order.

        Raises:
            PeerLost: it is gone. The next call looks for its successor.
            MessageError: it did not understand.
        """
        ...


class LocalPeer:
    """A piece in this process: the same messages, without a hop."""

    def __init__(self, pieces: Mapping[str, Answering], name: str) -> None:
        self._pieces = pieces
        self._name = name

    async def call(self, method: str, data: bytes = b"") -> Any:
        piece = self._pieces.get(self._name)
        if piece is None:
            raise PeerLost(self._name)
        return await piece.answer(method, data)


class RemoteActor:
    """An actor by name; its handle is looked up when needed, and again after a loss."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._handle: Any = None

    async def call(self, method: str, *args: Any) -> Any:
        """What its method returns.

        Raises:
            PeerLost: it is gone or not there yet.
        """
        handle = self._handle = self._handle or self._find()
        try:
            return await getattr(handle, method).remote(*args)
        except RayActorError as error:
            if self._handle is handle:
                self._handle = None
            raise PeerLost(self._host) from error

    def _find(self) -> Any:
        try:
            return ray.get_actor(actor_name(self._host), namespace=NAMESPACE)
        except ValueError as error:
            raise PeerLost(self._host) from error


class RemotePeer:
    """A piece in another actor."""

    def __init__(self, name: str, host: str, delay_s: float = 0.0) -> None:
        self._name = name
        self._actor = RemoteActor(host)
        self._delay_s = delay_s

    async def call(self, method: str, data: bytes = b"") -> Any:
        if not self._delay_s:
            return await self._actor.call("call", self._name, method, data)
        await asyncio.sleep(self._delay_s)
        reply = await self._actor.call("call", self._name, method, data)
        await asyncio.sleep(self._delay_s)
        return reply


class PeerBook:
    """The other pieces by name.

    Args:
        placement: ``fused`` or ``split``.
        local: The pieces of this process by name; may grow and shrink.
        host: The name of this process among the hosts; empty outside of them.
        delay_s: Holds back every message and its answer; to measure that nothing waits for them.
    """

    def __init__(
        self,
        placement: str,
        local: Mapping[str, Answering] | None = None,
        host: str = "",
        delay_s: float = 0.0,
    ) -> None:
        self.placement = placement
        self._local = local if local is not None else {}
        self._host = host
        self._delay_s = delay_s

    def peer(self, name: str) -> Peer:
        """The piece of that name, here or elsewhere."""
        host = host_of(name, self.placement)
        if host == self._host or name in self._local:
            return LocalPeer(self._local, name)
        return RemotePeer(name, host, self._delay_s)
