"""One declaration for caller, wire and handler."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import msgpack
import pytest
from prometheus_client import CollectorRegistry

from farsight import actors
from farsight.actors.calls.message import declared, message, message_of, stub
from farsight.actors.calls.scheduling import RouterCalls, SchedulerCalls, WorkerCalls
from farsight.actors.calls.supervisor import SupervisorCalls
from farsight.actors.runtime.component import Component, ComponentContext, component_class
from farsight.actors.runtime.peer import LocalPeer, Site
from farsight.core.codec import PackedInts, encode
from farsight.core.config.load import FarsightConfig
from farsight.core.errors import MessageError
from farsight.core.messages import SCHEMA_VERSION
from farsight.core.messages.requests import Keys, Refusals, Submit
from farsight.core.request import Request, SamplingParams
from tests.unit.actors.components import component_context


class EchoCalls(Protocol):
    @message()
    async def same(self, keys: Keys) -> Keys: ...

    @message()
    async def perhaps(self, keys: Keys) -> Keys | None: ...

    @message()
    async def keep(self, keys: Keys) -> None: ...

    @message(packed=True)
    async def count(self, submit: Submit) -> Refusals: ...


class TwoCalls(Protocol):
    """What no contract may look like."""

    @message()
    async def two(self, one: Keys, other: Keys) -> None: ...


class Echo(Component, EchoCalls):
    kind = "Echo"
    taken: Any = None

    async def same(self, keys: Keys) -> Keys:
        self.taken = keys
        return keys

    async def perhaps(self, keys: Keys) -> Keys | None:
        return keys if keys.keys else None

    async def keep(self, keys: Keys) -> None:
        self.taken = keys

    async def count(self, submit: Submit) -> Refusals:
        self.taken = submit.requests[0].prompt_ids
        return Refusals(())

    async def undeclared(self, data: bytes) -> bytes:
        return data


def echo(refused: list[tuple[str, str, str]] | None = None) -> Echo:
    site = Site(FarsightConfig(), "", "fused")
    count = (lambda *what: None) if refused is None else (lambda *what: refused.append(what))
    return Echo(ComponentContext("echo-0", site, 0, site.peers(), CollectorRegistry(), count))


KEYS = Keys((("a", 0), ("b", 1)))


async def test_a_stub_carries_values_over_the_wire_and_shares_no_object() -> None:
    component = echo()
    calls: EchoCalls = stub(EchoCalls, LocalPeer({"echo-0": component}, "echo-0"))
    reply = await calls.same(KEYS)
    assert reply == component.taken == KEYS
    assert reply is not component.taken and component.taken is not KEYS
    assert await calls.perhaps(KEYS) == KEYS
    assert await calls.perhaps(Keys(())) is None
    component.taken = None
    await calls.keep(KEYS)
    assert component.taken == KEYS


async def test_tokens_that_are_only_passed_on_stay_packed() -> None:
    component = echo()
    calls: EchoCalls = stub(EchoCalls, LocalPeer({"echo-0": component}, "echo-0"))
    await calls.count(Submit((Request("r", 0, "i", tuple(range(100)), SamplingParams(4)),)))
    assert type(component.taken) is PackedInts and len(component.taken) == 100


async def test_only_declared_methods_answer_and_refusals_are_counted_by_method_and_field() -> None:
    refused: list[tuple[str, str, str]] = []
    component = echo(refused)
    for method in ("undeclared", "start", "stop", "answer", "spawn", "__init__", "_task_ended"):
        with pytest.raises(MessageError, match="a message that this component answers"):
            await component.answer(method, encode(KEYS))
    with pytest.raises(MessageError, match="Keys"):
        await component.answer("same", b"")
    assert refused == [("echo-0", "unknown", "method")] * 7 + [("echo-0", "same", "Keys")]


async def test_a_meter_runs_while_messages_are_encoded_and_decoded_and_not_while_the_answer_is_awaited() -> None:
    inside = 0

    class Meter(nullcontext[None]):
        def __enter__(self) -> None:
            nonlocal inside
            inside += 1

    class Peer:
        async def call(self, method: str, data: bytes = b"", *, long: bool = False) -> bytes:
            assert (inside, long) == (1, False)
            return data

    def meter() -> AbstractContextManager[None]:
        return Meter()

    calls: EchoCalls = stub(EchoCalls, Peer(), meter)
    assert await calls.same(KEYS) == KEYS
    assert inside == 2


def test_a_declaration_says_what_crosses() -> None:
    submit = declared(RouterCalls)["submit"]
    assert (submit.request, submit.keep_packed, submit.is_long) == (Submit, True, False)
    told = {"submit", "foresee", "abort", "unknown", "explain", "live", "cached", "recall"}
    assert declared(SchedulerCalls).keys() == told
    assert declared(RouterCalls)["model"].is_optional
    assert message_of(SupervisorCalls.started).is_long and message_of(SupervisorCalls.started).reply is None
    assert all(each.is_long for each in declared(WorkerCalls).values())

    with pytest.raises(TypeError, match="takes 2 arguments"):
        declared(TwoCalls)


COMPONENTS = (
    "router",
    "scheduler-0",
    "kv-offload-manager-0",
    "worker-0",
    "length-predictor-0",
    "serving-time-estimator-0",
    "log-store",
    "supervisor",
)


@pytest.mark.parametrize("component", COMPONENTS)
def test_every_handler_is_declared(component: str) -> None:
    """A public coroutine that no contract declares would never be called; a declared one needs a handler."""
    kind: Any = component_class(component, FarsightConfig())
    public = [name for name in dir(kind) if not name.startswith("_") and not hasattr(Component, name)]
    assert {name for name in public if asyncio.iscoroutinefunction(getattr(kind, name))} == declared(kind).keys()
    contracts = [base for base in kind.__mro__ if getattr(base, "_is_protocol", False)]
    assert all(getattr(kind, name) is not vars(base).get(name) for base in contracts for name in declared(kind))


def malformed(kind: Any) -> Iterator[tuple[bytes, str]]:
    """Messages that are no ``kind``, and the field that is to be named."""
    name = kind.__name__
    fields = [field.name for field in dataclasses.fields(kind)]
    wrong: list[Any] = [{} for _ in fields]  # no field of any message is a map
    yield b"", name
    yield b"\xc1", name
    yield msgpack.packb([SCHEMA_VERSION, name, *wrong])[:-1], name
    yield msgpack.packb(7), name
    yield msgpack.packb([SCHEMA_VERSION, "Nonsense", *wrong]), f"{name}.type"
    yield msgpack.packb([SCHEMA_VERSION + 1, name, *wrong]), f"{name}.version"
    yield msgpack.packb([SCHEMA_VERSION - 1, name, *wrong]), f"{name}.version"
    yield msgpack.packb([SCHEMA_VERSION, name, *wrong]), f"{name}.{fields[0]}"
    yield msgpack.packb([SCHEMA_VERSION, name, *wrong, 0]), name


@pytest.mark.parametrize("name", COMPONENTS)
async def test_malformed_messages_are_refused_and_counted_by_field(name: str) -> None:
    refused: list[tuple[str, str, str]] = []
    kind: Any = component_class(name, FarsightConfig())
    context = dataclasses.replace(component_context(name), count_refused=lambda *what: refused.append(what))
    component = kind(context)
    expected: list[tuple[str, str, str]] = []
    for method, message_kind in ((each.name, each.request) for each in declared(kind).values() if each.request):
        for data, field in malformed(message_kind):
            with pytest.raises(MessageError) as caught:
                await Component.answer(component, method, data)  # a Supervisor's own waits till it has taken over
            assert f"{field}: got " in str(caught.value), f"{method} names another field: {caught.value}"
            expected.append((name, method, field))
    assert [(*who, re.sub(r"\[\d*\]", "[]", field)) for *who, field in refused] == expected


ROOT = Path(actors.__file__).parent.parent
BY_STRING = re.compile(r"""\.(call|send)\(\s*["']|\bcall\.remote\(""")


def test_no_call_by_a_methods_name_is_left() -> None:
    """Only the stub knows names; the calls of an actor's own methods through Ray stand in ``remote.py``."""
    found = {
        str(path.relative_to(ROOT))
        for room in ("actors", "services")
        for path in (ROOT / room).rglob("*.py")
        if BY_STRING.search(path.read_text().replace("redis.call(", ""))
    }
    assert found == {"actors/calls/message.py", "actors/runtime/remote.py"}


def test_our_sockets_carry_no_pickles() -> None:
    unpickles = re.compile(r"^\s*(import|from) (pickle|dill|cloudpickle|marshal|shelve)\b|allow_pickle=True", re.M)
    rooms = ("actors", "core", "engine", "estimator", "kvcache", "policies", "predictor", "services", "tokenization")
    found = [path for room in rooms for path in (ROOT / room).rglob("*.py") if unpickles.search(path.read_text())]
    assert found == []
