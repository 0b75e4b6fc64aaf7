"""What no component understands is refused, counted, and changes nothing."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest

from actors.calls.message import declared
from actors.runtime.component import component_class
from core.config.load import FarsightConfig
from core.errors import MessageError
from core.messages import SCHEMA_VERSION
from services.ingress.engine_client import EngineClient
from tests.actors.local_system import System, Truth, read, rows
from tests.unit.actors.calls.test_calls import COMPONENTS


def takes(component: str) -> dict[str, Any]:
    """What the component takes, by method; from its own declarations."""
    kind: Any = component_class(component, FarsightConfig())
    return {each.name: each.request for each in declared(kind).values() if each.request is not None}


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


@pytest.mark.parametrize("component", COMPONENTS)
async def test_malformed_messages_are_refused_and_counted_and_kill_no_component(
    system: System, client: EngineClient, truth: Truth, component: str
) -> None:
    pids = {name: row.pid for name, row in (await rows(client)).items() if row.kind != "Ingress"}
    peers = system.site.peers()
    peer = peers.peer(component)
    counted = await system.refused(component)
    for method, kind in takes(component).items():
        for data, field in malformed(kind):
            with pytest.raises(MessageError) as caught:
                await peer.call(method, data)
            assert str(caught.value).find(f"{field}: got ") >= 0, f"{method} names another field: {caught.value}"
            label = method, re.sub(r"\[\d+\]", "[]", field)
            counted[label] = counted.get(label, 0) + 1
    for method in ("no_such_thing", "_handle", "__init__", "start", "stop", "answer", "spawn", "queue"):
        with pytest.raises(MessageError, match="a message that this component answers"):
            await peer.call(method, b"")
        counted["unknown", "method"] = counted.get(("unknown", "method"), 0) + 1
    peers.close()
    assert await system.refused(component) == counted
    truth.check(1, await read(client, 1, 20), 20)
    status = await rows(client)
    assert {name: status[name].pid for name in pids} == pids
