"""What no component understands is refused, counted, and changes nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest

from actors.runtime.component import Component
from actors.runtime.registry import component_class
from core.config.load import FarsightConfig
from core.errors import MessageError
from core.messages import SCHEMA_VERSION
from core.messages.fleet import ReplicaName, ReplicaNews, ReplicaState
from core.messages.forecasts import ForecastQuestions, ForecastsMade
from core.messages.log import (
    Artefact,
    ArtefactName,
    FinishedBatches,
    FinishedRequests,
    ForecastRecords,
    LogQuery,
    RequestTraces,
    TraceQuery,
)
from core.messages.plans import Plan, ReportPoll, StepReport
from core.messages.requests import Announce, Keys, Submit
from core.messages.status import ComponentStatus, Scale
from core.messages.step_times import StepSamples
from core.messages.tokens import TokenPoll
from services.ingress.engine_client import EngineClient
from tests.actors.house import House, Truth, read, rows

TAKES: dict[str, dict[str, Any]] = {
    "router": {
        "submit": Submit,
        "foresee": ForecastsMade,
        "abort": Keys,
        "announce": Announce,
        "introduce": ComponentStatus,
        "replica_state": ReplicaState,
        "replica_news": ReplicaNews,
        "drain": ReplicaName,
        "forget": ReplicaName,
        "explain": TraceQuery,
    },
    "scheduler-0": {
        "submit": Submit,
        "foresee": ForecastsMade,
        "abort": Keys,
        "unknown": Keys,
        "explain": TraceQuery,
    },
    "kv-offload-manager-0": {"observe": StepReport},
    "worker-0": {"push_plan": Plan, "poll_report": ReportPoll, "poll_tokens": TokenPoll},
    "length-predictor-0": {"predict": ForecastQuestions},
    "serving-time-estimator-0": {"observe": StepSamples},
    "log-store": {
        "append": FinishedRequests,
        "append_forecasts": ForecastRecords,
        "append_batches": FinishedBatches,
        "append_traces": RequestTraces,
        "read": LogQuery,
        "read_examples": LogQuery,
        "read_batches": LogQuery,
        "read_traces": TraceQuery,
        "put_artefact": Artefact,
        "set_current": ArtefactName,
        "read_artefact": ArtefactName,
    },
    "supervisor": {"scale": Scale},
}
"""What each component takes, by method."""

TAKES_NOTHING = {
    "router": {"ingress_rows", "model", "outlook", "placement"},
    "scheduler-0": {"cached"},
    "kv-offload-manager-0": {"usage"},
    "worker-0": {"connect", "gather"},
    "length-predictor-0": {"forecast"},
    "serving-time-estimator-0": {"profile"},
    "log-store": {"artefacts"},
    "supervisor": {"counts", "started"},
}


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


def _class_of(component: str) -> type[Component]:
    return component_class(component, FarsightConfig())


@pytest.mark.parametrize("component", TAKES)
def test_every_message_of_every_component_is_tried_here(component: str) -> None:
    own = {name for name in dir(_class_of(component)) if not name.startswith("_") and not hasattr(Component, name)}
    methods = {name for name in own if asyncio.iscoroutinefunction(getattr(_class_of(component), name))}
    assert methods == TAKES[component].keys() | TAKES_NOTHING[component]


@pytest.mark.parametrize("component", TAKES)
async def test_what_is_malformed_is_refused_and_counted_and_kills_nobody(
    house: House, client: EngineClient, truth: Truth, component: str
) -> None:
    pids = {name: row.pid for name, row in (await rows(client)).items() if row.kind != "Ingress"}
    peers = house.site.peers()
    peer = peers.peer(component)
    counted = await house.refused(component)
    for method, kind in TAKES[component].items():
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
    assert await house.refused(component) == counted
    truth.check(1, await read(client, 1, 20), 20)
    status = await rows(client)
    assert {name: status[name].pid for name in pids} == pids
