"""From a typed call to a message and back: the one place that names methods by strings and encodes their arguments.

A contract is a ``Protocol`` whose methods are declared with ``@message()``. The component that answers derives from it,
so mypy checks its handlers. Callers get a stub of the same type (``PeerBook.router()``), so mypy checks them too. The
annotations of the declaration are the types on the wire.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from farsight.core.codec import decode, encode

F = TypeVar("F", bound=Callable[..., Coroutine[Any, Any, Any]])
R = TypeVar("R")

Meter = Callable[[], AbstractContextManager[None]]
"""Makes a context manager that measures the work done inside."""

_MARK = "_farsight_message"


class Peer(Protocol):
    """One other component, as the transport sees it."""

    async def call(self, method: str, data: bytes = b"", *, long: bool = False) -> Any:
        """Sends a message; returns the answer, usually ``bytes``. Messages to the same peer arrive in order.

        Args:
            long: The answer may take any time, until there is something to report; else it is due within
                ``remote.REPLY_S``.

        Raises:
            PeerLost: The peer is gone. The next call looks for its successor.
            MessageError: The peer refused the message as malformed.
        """
        ...


@dataclass(frozen=True, slots=True)
class Message:
    """One method of a contract.

    Attributes:
        request: Type of the argument; None if the method takes none.
        reply: Type of the answer; None if the method returns nothing.
        is_optional: Whether the method may return None instead of a ``reply``.
        is_long: As ``message(long=...)``; ``keep_packed`` as ``message(packed=...)``.
    """

    name: str
    request: type[Any] | None
    reply: type[Any] | None
    is_optional: bool
    is_long: bool
    keep_packed: bool

    def read_request(self, data: bytes) -> tuple[Any, ...]:
        """Decodes the handler's arguments; raises MessageError."""
        return () if self.request is None else (decode(data, self.request, keep_packed=self.keep_packed),)

    def write_reply(self, reply: Any) -> bytes:
        return b"" if reply is None and (self.is_optional or self.reply is None) else encode(reply)

    def read_reply(self, data: bytes) -> Any:
        """Decodes what the handler returned; raises MessageError."""
        return None if self.reply is None or (self.is_optional and not data) else decode(data, self.reply)


def message(*, long: bool = False, packed: bool = False) -> Callable[[F], F]:
    """Declares a method of a contract: ``async def name(self, request: Request) -> Reply``.

    Args:
        long: The answer may take any time: until there is something to report, a model has loaded or requests have
            drained.
        packed: The handler only counts the tokens in the request and passes them on: they stay ``PackedInts``.
    """

    def mark(function: F) -> F:
        setattr(function, _MARK, (long, packed))
        return function

    return mark


@functools.cache
def declared(kind: Any) -> dict[str, Message]:
    """Returns the messages that a component class answers or a contract declares, by method name."""
    found = {}
    for base in kind.__mro__:
        for name, value in vars(base).items():
            if hasattr(value, _MARK):
                found[name] = message_of(value)
    return found


@functools.cache
def message_of(function: Callable[..., Any]) -> Message:
    """Returns the message of a declared method, with the types of its argument and answer.

    Raises:
        TypeError: The method takes more than one argument.
    """
    is_long, keep_packed = getattr(function, _MARK)
    hints = typing.get_type_hints(function)
    reply = hints.pop("return")
    if len(hints) > 1:
        raise TypeError(f"{function.__qualname__} takes {len(hints)} arguments; a message is one")
    request = next(iter(hints.values()), None)
    answers = [kind for kind in typing.get_args(reply) or (reply,) if kind is not types.NoneType]
    is_optional = types.NoneType in typing.get_args(reply)
    return Message(function.__name__, request, answers[0] if answers else None, is_optional, is_long, keep_packed)


class _Stub:
    """A peer with the methods of a contract."""

    def __init__(self, peer: Peer, meter: Meter | None) -> None:
        self._peer = peer
        self._meter = meter


def stub(contract: Any, peer: Peer, meter: Meter | None = None) -> Any:
    """Makes an object that has the methods of the contract and sends their messages to the peer.

    The contract is ``Any`` because mypy accepts no protocol where a class is wanted; ``PeerBook`` gives stubs types.

    Args:
        meter: Measures the time in which requests are encoded and answers decoded.
    """
    return _stub_class(contract)(peer, meter)


@functools.cache
def _stub_class(contract: type) -> type[_Stub]:
    methods = {name: _sender(each) for name, each in declared(contract).items()}
    return type(f"{contract.__name__}Stub", (_Stub,), methods)


def _sender(each: Message) -> Callable[..., Coroutine[Any, Any, Any]]:
    async def send(self: _Stub, request: Any = None) -> Any:
        if self._meter is not None:
            return await _send_metered(each, self._peer, request, self._meter)
        data = b"" if request is None else encode(request)
        return each.read_reply(await self._peer.call(each.name, data, long=each.is_long))

    return send


async def _send_metered(each: Message, peer: Peer, request: Any, meter: Meter) -> Any:
    with meter():
        data = b"" if request is None else encode(request)
    reply = await peer.call(each.name, data, long=each.is_long)
    with meter():
        return each.read_reply(reply)


class Asked(Generic[R]):
    """A question to a component through the handle of its Ray actor, by a thread without an event loop.

    Args:
        handle: Handle of the actor that hosts the component.
        method: A method of a contract, such as ``SupervisorCalls.counts``.
        request: The method's argument; None if it takes none.
    """

    def __init__(
        self, handle: Any, component: str, method: Callable[..., Coroutine[Any, Any, R]], request: Any = None
    ) -> None:
        self._message = message_of(method)
        data = b"" if request is None else encode(request)
        self.ref: Any = handle.call.remote(component, self._message.name, data)

    def read(self, data: bytes) -> R:
        """Decodes the answer from the bytes that ``ray.get(asked.ref)`` returns."""
        reply: R = self._message.read_reply(data)
        return reply
