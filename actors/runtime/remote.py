"""Speaking to an actor by its name."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.exceptions import ActorUnschedulableError, ObjectLostError, RayActorError

from actors.runtime.local_link import LinkLost, LocalLink, connect
from actors.runtime.names import NAMESPACE, actor_name
from actors.runtime.peer import PeerLost
from core.codec import decode
from core.messages.status import ComponentRows, ComponentStatus

REPLY_S = 120.0
"""An answer that is due at once and has not come after so long will not come: the component answers others perhaps, but
hangs in this one. A process that hangs as a whole is ended sooner, and its connections with it."""


class RemoteActor:
    """An actor by name; its handle is looked up when needed, and again after a loss.

    Args:
        local: Whether messages take the short way where the actor is on this node.
    """

    def __init__(self, host: str, namespace: str = NAMESPACE, *, local: bool = True) -> None:
        self._host = host
        self._namespace = namespace
        self._handle: Any = None
        self._local = local
        self._link: LocalLink | None = None
        self._linked_to: Any = None  # the handle that was last asked for its address
        self._linking = asyncio.Lock()
        self._num_linking = 0  # messages that wait for the link; later ones must not overtake them

    async def send(self, component: str, method: str, data: bytes, *, long: bool = False) -> Any:
        """What the component of that name answers; over a socket if the actor is on this node.

        Args:
            long: The answer may take as long as there is nothing to tell: only a lost process ends the wait.

        Raises:
            PeerLost: it is gone, not there yet, or does not answer what is due at once.
        """
        if long:
            return await self._send(component, method, data)
        deadline = asyncio.timeout(REPLY_S)
        try:
            async with deadline:
                return await self._send(component, method, data)
        except TimeoutError as error:
            if not deadline.expired():
                raise  # the answer itself
            raise PeerLost(f"{component} has not answered {method} for {REPLY_S:.0f} s") from error

    async def _send(self, component: str, method: str, data: bytes) -> Any:
        link = self._link
        if link is None or not link.open or self._num_linking:
            link = await self._connected()
        if link is None:
            return await self.call("call", component, method, data)
        try:
            return await link.call(component, method, data)
        except LinkLost as error:
            self._handle = None
            raise PeerLost(self._host) from error

    def close(self) -> None:
        """Ends the connection, if there is one; the next message makes another."""
        if self._link is not None:
            self._link.close()

    async def _connected(self) -> LocalLink | None:
        """A link to the actor that has the name now; None if there can be none."""
        if not self._local:
            return None
        self._num_linking += 1
        try:
            async with self._linking:  # first come, first served
                if self._link is not None and self._link.open:
                    return self._link
                return await self._make_link()
        finally:
            self._num_linking -= 1

    async def _make_link(self) -> LocalLink | None:
        if self._handle is not None and self._handle is self._linked_to:
            return None  # asked before: it is on another node
        node_id, address = await self.call("local_address")
        self._linked_to, self._link = self._handle, None
        if address and node_id == ray.get_runtime_context().get_node_id():
            self._link = await connect(address)
        return self._link

    async def rows(self) -> tuple[ComponentStatus, ...]:
        """The components of this process; raises PeerLost."""
        return decode(await self.call("rows"), ComponentRows).components

    async def metrics(self) -> str:
        """What its /metrics shows; raises PeerLost."""
        text: str = await self.call("metrics")
        return text

    async def call(self, method: str, *args: Any) -> Any:
        """What the actor's method returns, through Ray.

        Raises:
            PeerLost: it is gone or not there yet.
        """
        handle = self._handle = self._handle or self._find()
        try:
            return await getattr(handle, method).remote(*args)
        except (RayActorError, ActorUnschedulableError, ObjectLostError) as error:
            # The last: a long answer went down with its node; the one before: the node was lost before it started.
            if self._handle is handle:
                self._handle = None
            raise PeerLost(self._host) from error

    def _find(self) -> Any:
        try:
            return ray.get_actor(actor_name(self._host), namespace=self._namespace)
        except ValueError as error:
            raise PeerLost(self._host) from error
