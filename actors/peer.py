"""How a piece speaks to another one, wherever that lives."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError

from actors.names import NAMESPACE, actor_name, host_of
from core.errors import FarsightError

LOOK_AGAIN_S = 0.05
"""How often a lost peer is looked for."""


class PeerLost(FarsightError):
    """The process of the piece is gone, or not there yet; whether it took the message is unknown."""


class Peer(Protocol):
    """One other piece."""

    async def call(self, method: str, data: bytes = b"") -> Any:
        """Its answer, usually ``bytes``; messages to the same peer arrive in order.

        Raises:
            PeerLost: it is gone. The next call looks for its successor.
        """
        ...


class LocalPeer:
    """A piece in this process: the same messages, without a hop."""

    def __init__(self, pieces: dict[str, Any], name: str) -> None:
        self._pieces = pieces
        self._name = name

    async def call(self, method: str, data: bytes = b"") -> Any:
        piece = self._pieces.get(self._name)
        if piece is None:
            raise PeerLost(self._name)
        return await getattr(piece, method)(data)


class RemotePeer:
    """A piece in another actor; its handle is looked up by name and again after a loss."""

    def __init__(self, name: str, host: str, delay_s: float = 0.0) -> None:
        self._name = name
        self._actor = actor_name(host)
        self._delay_s = delay_s
        self._handle: Any = None

    async def call(self, method: str, data: bytes = b"") -> Any:
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        handle = self._handle = self._handle or self._find()
        try:
            return await handle.call.remote(self._name, method, data)
        except RayActorError as error:
            if self._handle is handle:
                self._handle = None
            raise PeerLost(self._name) from error

    def _find(self) -> Any:
        try:
            return ray.get_actor(self._actor, namespace=NAMESPACE)
        except ValueError as error:
            raise PeerLost(self._name) from error


class PeerBook:
    """The other pieces by name.

    Args:
        placement: ``fused`` or ``split``.
        local: The pieces of this process by name; may grow later.
        scheduler_delay_s: Holds back calls to Schedulers, to measure that nothing waits for them.
    """

    def __init__(self, placement: str, local: dict[str, Any] | None = None, scheduler_delay_s: float = 0.0) -> None:
        self._placement = placement
        self._local = local if local is not None else {}
        self._delay_s = scheduler_delay_s

    def peer(self, name: str) -> Peer:
        """The piece of that name, here or elsewhere."""
        host = host_of(name, self._placement)
        if name in self._local:
            return LocalPeer(self._local, name)
        delay_s = self._delay_s if name.startswith("scheduler-") else 0.0
        return RemotePeer(name, host, delay_s)
