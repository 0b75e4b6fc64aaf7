"""Exceptions cross our sockets as plain values."""

from __future__ import annotations

import pickle
from typing import Any

import msgpack
import pytest

from farsight.actors.calls.failures import MAX_TEXT, RemoteError, read_failure, write_failure
from farsight.actors.runtime.peer import PeerLost
from farsight.core.errors import (
    CapacityError,
    ConfigError,
    FarsightError,
    IntegrityError,
    InvalidValueError,
    MessageError,
    RankLost,
    WorkerBroken,
)


def crossed(error: Exception) -> Exception:
    return read_failure(msgpack.unpackb(msgpack.packb(write_failure(error))))


KNOWN = [
    FarsightError("the log store cannot write"),
    IntegrityError("a block is free twice"),
    RankLost("rank 1 is gone"),
    WorkerBroken("no device"),
    PeerLost("worker-0"),
    CapacityError("too many prompt tokens in flight", 4.5),
    InvalidValueError("a.b", 7, "an even number"),
    ConfigError("server.port", "x" * 1000, "a port"),
    MessageError("Keys.keys[0]", [1, {"a": b"b"}], "an array of 2"),
    MessageError("Keys", b"\xc1", "a msgpack message"),
    MessageError("count", 2**70, "an integer"),
    MessageError("field", "\ud800", "text"),
    TimeoutError("too late"),
]


@pytest.mark.parametrize("error", KNOWN, ids=lambda error: f"{type(error).__name__}-{str(error)[:20]!a}")
def test_known_errors_arrive_as_themselves(error: Exception) -> None:
    found = crossed(error)
    assert type(found) is type(error)
    assert str(found) == str(error)
    for field in ("field", "expected", "retry_after_s"):
        assert getattr(found, field, None) == getattr(error, field, None)


def test_a_plain_value_arrives_as_itself() -> None:
    for value in (None, True, 3, -1, 0.5, "text", b"bytes", 2**64 - 1):
        found = crossed(MessageError("f", value, "something else"))
        assert isinstance(found, MessageError) and found.value == value


def test_a_subclass_that_is_not_in_the_table_arrives_as_its_base() -> None:
    class Special(InvalidValueError):
        pass

    assert type(crossed(Special("f", 1, "two"))) is InvalidValueError


def test_other_errors_arrive_as_one_remote_error() -> None:
    found = crossed(ZeroDivisionError("division by zero"))
    assert type(found) is RemoteError and not isinstance(found, FarsightError)
    assert (found.kind, str(found)) == ("ZeroDivisionError", "ZeroDivisionError: division by zero")
    assert len(str(crossed(ValueError("x" * 10**6)))) < MAX_TEXT + 100


class Trap:
    """What a hostile pickle is: it runs a function when it is read."""

    sprung = False

    def __reduce__(self) -> tuple[Any, ...]:
        return spring, ()


def spring() -> Exception:
    Trap.sprung = True
    return RuntimeError("sprung")


HOSTILE = [
    pickle.dumps(Trap()),
    pickle.dumps(RuntimeError("x")),
    ["unknown", pickle.dumps(Trap()), []],
    ["unknown", "text", [pickle.dumps(Trap())]],
    ["message", "text", ["f", False, pickle.dumps(Trap())]],
    ["os.system", "true", ["true"]],
    ["message", "text", []],
    ["capacity", "text", ["soon"]],
    ["capacity", "text", 7],
    [],
    None,
    7,
    {"code": "farsight"},
    [["farsight"], "text", []],
    ["x" * 10**6, "text", []],
]


@pytest.mark.parametrize("record", HOSTILE, ids=range(len(HOSTILE)))
def test_what_would_be_a_pickle_is_never_read_as_one(record: Any) -> None:
    pickle.loads(pickle.dumps(Trap()))
    assert Trap.sprung, "the trap works"
    Trap.sprung = False
    assert isinstance(read_failure(record), RemoteError | MessageError)
    assert not Trap.sprung
