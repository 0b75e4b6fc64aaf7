"""``/healthz`` and ``/metrics`` of one process, over a real socket."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator

import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.parser import text_string_to_metric_families

from farsight.actors.runtime.health import HealthServer
from farsight.core.messages.status import ComponentStatus

ROUTER = ComponentStatus("router", "Router", 7, "here", "ready", 2, None, restarts=1, http_port=0)


class _Process:
    """What the server shows, to be changed by a test."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.rows = [ROUTER, dataclasses.replace(ROUTER, name="log-store", kind="LogStore", last_step_age_s=0.5)]


@pytest.fixture
def process() -> _Process:
    return _Process()


@pytest.fixture
async def client(process: _Process) -> AsyncGenerator[httpx.AsyncClient, None]:
    server = HealthServer(process.registry, lambda: process.rows)
    port = await server.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as opened:
        yield opened
    await server.stop()


async def test_healthz_shows_every_component(client: httpx.AsyncClient) -> None:
    reply = await client.get("/healthz")
    assert reply.status_code == 200
    router = {"name": "router", "kind": "Router", "state": "ready", "queue": 2, "restarts": 1, "pid": 7, "degraded": ""}
    log_store = {**router, "name": "log-store", "kind": "LogStore"}
    assert (
        reply.json()["components"]
        == reply.json()["pieces"]
        == [{**router, "last_step_age_s": None}, {**log_store, "last_step_age_s": 0.5}]
    )


@pytest.mark.parametrize(
    ("state", "status"),
    [("ready", 200), ("draining", 200), ("starting", 503), ("waiting", 503), ("dead", 503), ("lost", 503)],
)
async def test_one_component_decides(client: httpx.AsyncClient, process: _Process, state: str, status: int) -> None:
    process.rows[1] = dataclasses.replace(process.rows[1], state=state)
    reply = await client.get("/healthz")
    assert reply.status_code == status
    assert [row["state"] for row in reply.json()["components"]] == ["ready", state]


async def test_metrics_are_those_of_the_registry(client: httpx.AsyncClient, process: _Process) -> None:
    Gauge("farsight:things", "Things.", registry=process.registry).set(3)
    reply = await client.get("/metrics")
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    (family,) = text_string_to_metric_families(reply.text)
    assert (family.name, family.samples[0].value) == ("farsight:things", 3)


async def test_stop_closes_the_port_and_may_be_repeated() -> None:
    server = HealthServer(CollectorRegistry(), lambda: [])
    await server.stop()
    port = await server.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        assert (await client.get("/healthz")).json() == {"components": [], "pieces": []}
        await server.stop()
        with pytest.raises(httpx.ConnectError):
            await client.get("/healthz")
    await server.stop()


async def test_an_address_of_another_machine_is_refused() -> None:
    server = HealthServer(CollectorRegistry(), lambda: [], host="192.0.2.1")
    with pytest.raises(OSError, match=r"192\.0\.2\.1"):
        await server.start()
