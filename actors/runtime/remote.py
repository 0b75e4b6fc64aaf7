"""Messages to an actor by its name: through Ray, or over a socket if the actor is on the same node.

A message over the socket costs a tenth of an actor call of Ray. The socket has a name in Linux's abstract namespace,
so nothing lies in a file system and a dead process leaves nothing behind; a process of another user is turned away.
Frames are msgpack arrays: ``[id, component, method, data]`` there, ``[id, ok, result]`` back. The result of a failure
is the record of ``actors.calls.failures``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import socket
import struct
import sys
from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgpack
import ray
from ray.exceptions import ActorUnschedulableError, ObjectLostError, RayActorError

from farsight.actors.calls.failures import PeerLost, read_failure, write_failure
from farsight.actors.runtime.names import NAMESPACE, actor_name
from farsight.core.errors import FarsightError

AVAILABLE = sys.platform == "linux"
MAX_FRAME_BYTES = 2**31 - 1

_PEER_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid

Answer = Callable[[str, str, bytes], Awaitable[Any]]
"""Gives the message (component, method, data) to its component."""

REPLY_S = 120.0
"""Seconds after which an answer that is due at once is given up: the component may answer others but hangs in this one.
A process that hangs as a whole is ended sooner, and its connections with it."""


class RemoteActor:
    """An actor by name; its handle is looked up when needed, and again after a loss."""

    def __init__(self, host: str, namespace: str = NAMESPACE) -> None:
        self._host = host
        self._namespace = namespace
        self._handle: Any = None
        self._link: LocalLink | None = None
        self._linked_to: Any = None  # the handle that was last asked for its address
        self._linking = asyncio.Lock()
        self._num_linking = 0  # messages that wait for the link; later ones must not overtake them

    async def send(self, component: str, method: str, data: bytes, *, long: bool = False) -> Any:
        """Sends a message to the component of that name and returns the answer.

        Args:
            long: The answer may take any time, until there is something to report: only a lost process ends the wait.

        Raises:
            PeerLost: The process is gone or not there yet, or an answer that is due at once does not come.
        """
        if long:
            return await self._send(component, method, data)
        deadline = asyncio.timeout(REPLY_S)
        try:
            async with deadline:
                return await self._send(component, method, data)
        except TimeoutError as error:
            if not deadline.expired():
                raise  # a TimeoutError that the component raised
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
        """Closes the connection, if there is one; the next message opens another."""
        if self._link is not None:
            self._link.close()

    async def _connected(self) -> LocalLink | None:
        """Returns a link to the actor that has the name now; None if no link is possible."""
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
            return None  # asked before: the actor is on another node
        node_id, address = await self.call("local_address")
        self._linked_to, self._link = self._handle, None
        if address and node_id == ray.get_runtime_context().get_node_id():
            self._link = await connect(address)
        return self._link

    async def metrics(self) -> str:
        """Returns what the process's /metrics shows; raises PeerLost."""
        text: str = await self.call("metrics")
        return text

    async def call(self, method: str, *args: Any) -> Any:
        """Calls a method of the actor through Ray and returns its result.

        Raises:
            PeerLost: The actor is gone or not there yet.
        """
        handle = self._handle = self._handle or self._find()
        try:
            return await getattr(handle, method).remote(*args)
        except (RayActorError, ActorUnschedulableError, ObjectLostError) as error:
            # The node of the actor was lost: before the start (ActorUnschedulableError), or with a long answer in it.
            if self._handle is handle:
                self._handle = None
            raise PeerLost(self._host) from error

    def _find(self) -> Any:
        try:
            return ray.get_actor(actor_name(self._host), namespace=self._namespace)
        except ValueError as error:
            raise PeerLost(self._host) from error


class LinkLost(FarsightError):
    """The process at the other end is gone; whether it received the message is unknown."""


class _Frames(asyncio.Protocol):
    """Frames in, frames out; frames sent in one turn of the event loop leave in one write."""

    def __init__(self) -> None:
        self._unpacker = msgpack.Unpacker(max_buffer_size=MAX_FRAME_BYTES)
        self._packer = msgpack.Packer()
        self._outgoing: list[bytes] = []
        self._loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's own is not a subclass

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None

    def data_received(self, data: bytes) -> None:
        self._unpacker.feed(data)
        for frame in self._unpacker:
            self.received(frame)

    def received(self, frame: Any) -> None:
        raise NotImplementedError

    def send(self, *frame: Any) -> None:
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(self._packer.pack(frame))

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        if self.transport is not None:
            self.transport.write(b"".join(outgoing))


class LocalLink(_Frames):
    """The calling end."""

    def __init__(self) -> None:
        super().__init__()
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    @property
    def open(self) -> bool:
        """Whether the link may be used from this event loop."""
        return self.transport is not None and self._loop is asyncio.get_running_loop()

    async def call(self, component: str, method: str, data: bytes) -> Any:
        """Sends a message; returns what the component answers, or raises what it raises. Messages arrive in order.

        Raises:
            LinkLost: The process is gone.
        """
        if self.transport is None:
            raise LinkLost(component)
        call_id = next(self._ids)
        self._waiting[call_id] = answer = self._loop.create_future()
        self.send(call_id, component, method, data)
        try:
            return await answer
        finally:
            self._waiting.pop(call_id, None)

    def received(self, frame: Any) -> None:
        call_id, ok, result = frame
        answer = self._waiting.get(call_id)
        if answer is None or answer.done():
            return  # the caller has been cancelled
        if ok:
            answer.set_result(result)
        else:
            answer.set_exception(read_failure(result))

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(LinkLost("the connection has ended"))

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()


class _Connection(_Frames):
    """The answering end of one caller."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self._answer = answer
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if _peer_uid(transport.get_extra_info("socket")) != os.getuid():
            transport.close()
            self.transport = None

    def received(self, frame: Any) -> None:
        if self.transport is None:
            return  # turned away
        task = self._loop.create_task(self._run(*frame))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, call_id: int, component: str, method: str, data: bytes) -> None:
        try:
            result, ok = await self._answer(component, method, data), True
        except Exception as error:
            result, ok = write_failure(error), False
        self.send(call_id, ok, result)


def _peer_uid(connection: Any) -> int:
    """Returns the user id at the other end of a socket, or of the object that an event loop shows in its place."""
    with socket.socket(fileno=os.dup(connection.fileno())) as duplicate:
        credentials = duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    uid: int = _PEER_CREDENTIALS.unpack(credentials)[1]
    return uid


async def listen(answer: Answer) -> tuple[str, asyncio.Server | None]:
    """Answers callers of this node while the server is referenced; returns an empty address if that is impossible."""
    if not AVAILABLE:
        return "", None
    address = f"\0farsight-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.setblocking(False)
    listener.bind(address)
    loop = asyncio.get_running_loop()
    return address, await loop.create_unix_server(lambda: _Connection(answer), sock=listener)


async def connect(address: str) -> LocalLink | None:
    """Connects to the process that listens at an address; None if there is none or another user's has the name."""
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        caller.setblocking(False)
        caller.connect(address)
        ours = _peer_uid(caller) == os.getuid()
    except OSError:
        ours = False
    if not ours:
        caller.close()
        return None
    with contextlib.suppress(OSError):
        _, link = await asyncio.get_running_loop().create_unix_connection(LocalLink, sock=caller)
        return link
    return None
