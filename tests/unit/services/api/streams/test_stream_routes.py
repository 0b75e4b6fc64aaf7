"""The header that asks for a resumable stream, and ``GET /v1/streams/{id}``, with keys and without."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message

from services.api.access.door import Door, DoorSettings
from services.api.access.keys import Role, Tenant
from services.api.answers import sse
from services.api.streams.keeper import StreamKeeper
from services.api.text.prompts import PromptEncoder
from tests.unit.services.api.access.access_support import add_key
from tests.unit.services.api.api_support import MODEL, whole_app
from tests.unit.services.api.streams.stream_support import PacedBackend, ShelfStore, events_of

RESUMABLE = {"X-Farsight-Resumable": "true"}
BODY = {"model": MODEL, "prompt": "hello", "max_tokens": 4, "stream": True, "temperature": 0}


@dataclass
class Service:
    """Two ingress replicas over one store; ``door`` of the first."""

    clients: list[httpx.AsyncClient]
    backend: PacedBackend
    keys: dict[str, str]
    doors: list[Door]
    keepers: list[StreamKeeper]
    store: ShelfStore

    def bearer(self, name: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.keys[name]}"} if name else {}

    async def begin(self, name: str = "", **fields: Any) -> httpx.Response:
        headers = {**RESUMABLE, **self.bearer(name)}
        return await self.clients[0].post("/v1/completions", json={**BODY, **fields}, headers=headers)

    async def resume(self, stream_id: str, name: str = "", last: str = "", replica: int = 1) -> httpx.Response:
        headers = self.bearer(name) | ({"Last-Event-ID": last} if last else {})
        return await self.clients[replica].get(f"/v1/streams/{stream_id}", headers=headers)


async def cut_off(service: Service, method: str, path: str, replica: int, body: bytes = b"") -> dict[str, str]:
    """The headers of an answer whose connection breaks as soon as they have come."""
    transport = service.clients[replica]._transport
    assert isinstance(transport, httpx.ASGITransport)
    begun: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
    received: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if received:
            return received.pop()
        await begun
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            assert message["status"] == 200
            begun.set_result({name.decode(): value.decode() for name, value in message["headers"]})

    headers = {"Host": "test", "Content-Type": "application/json", **RESUMABLE, **service.bearer("a")}
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "scheme": "http",
        "server": ("test", 80),
        "client": ("127.0.0.1", 1),
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
    }
    async with asyncio.timeout(60):
        await transport.app(scope, receive, send)
    return await begun


@pytest.fixture(params=["keys", "open"])
async def service(request: pytest.FixtureRequest, encoder: PromptEncoder, tmp_path: Path) -> AsyncIterator[Service]:
    """Where no keys are in use, any key that a client sends is an owner."""
    path = tmp_path / "keys.json"
    keys = {
        "a": add_key(path, "a", tenant=Tenant("a", max_in_flight=1)),
        "a2": add_key(path, "a2", tenant=Tenant("a", max_in_flight=1)),
        "b": add_key(path, "b"),
        "observe": add_key(path, "observe", Role.OBSERVE),
    }
    settings = DoorSettings(key_file=path if request.param == "keys" else None)
    backend, store = PacedBackend(), ShelfStore()
    doors, keepers = [Door(settings) for _ in range(2)], [StreamKeeper(store) for _ in range(2)]
    apps = [whole_app(backend, encoder, door=doors[i], keeper=keepers[i]) for i in range(2)]
    clients = [httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") for app in apps]
    running = [asyncio.create_task(keeper.run()) for keeper in keepers]
    yield Service(clients, backend, keys, doors, keepers, store)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    for client in clients:
        await client.aclose()


def error_of(reply: httpx.Response) -> tuple[int, str]:
    return reply.status_code, reply.json()["error"]["code"]


async def test_a_stream_is_read_again_from_any_event_at_any_replica(service: Service) -> None:
    service.backend.allow(4)
    reply = await service.begin("a", stream_options={"include_usage": True})
    assert reply.status_code == 200
    stream_id = reply.headers["X-Farsight-Stream"]
    events = events_of(reply.content)
    assert [event_id for event_id, _ in events] == [f"{stream_id}-{number + 1}" for number in range(6)]
    for replica in (0, 1, 0):
        for number, (event_id, _) in enumerate(events[:-1]):
            again = await service.resume(stream_id, "a", event_id, replica)
            assert again.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert events_of(again.content) == events[number + 1 :]
        assert events_of((await service.resume(stream_id, "a", replica=replica)).content) == events
        nothing = await service.resume(stream_id, "a", events[-1][0], replica)
        assert (nothing.status_code, nothing.content) == (204, b"")


async def test_a_stream_whose_headers_went_out_is_resumed_without_an_event(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection breaks twice before the first token: at the replica that began it, and at the one that took it."""
    monkeypatch.setattr(sse, "EARLY_S", 0.0)
    body = json.dumps(BODY).encode()
    stream_id = (await cut_off(service, "POST", "/v1/completions", 0, body))["x-farsight-stream"]
    for replica in (0, 1, 1):
        assert (await cut_off(service, "GET", f"/v1/streams/{stream_id}", replica))["x-farsight-stream"] == stream_id
    service.backend.allow(100)  # a replica may take some before it hears that the stream was taken
    whole = await service.resume(stream_id, "a", replica=0)
    assert "".join(json.loads(data)["choices"][0]["text"] for _, data in events_of(whole.content)[:-1]) == "0 1 2 3 "


async def test_the_headers_wait_until_another_replica_could_take_the_stream(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "EARLY_S", 0.0)
    service.store.away = True
    asked = asyncio.create_task(cut_off(service, "POST", "/v1/completions", 0, json.dumps(BODY).encode()))
    async with asyncio.timeout(60):
        while not service.backend.num_opened:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)
    assert not asked.done()
    service.store.away = False
    stream_id = (await asked)["x-farsight-stream"]
    assert (await cut_off(service, "GET", f"/v1/streams/{stream_id}", 1))["x-farsight-stream"] == stream_id


async def test_without_the_header_no_event_has_an_id(service: Service) -> None:
    service.backend.allow(8)
    for headers in ({}, {"X-Farsight-Resumable": "false"}):
        reply = await service.clients[0].post("/v1/completions", json=BODY, headers={**headers, **service.bearer("a")})
        assert "x-farsight-stream" not in reply.headers
        assert {event_id for event_id, _ in events_of(reply.content)} == {""}


async def test_a_wrong_header_is_refused(service: Service) -> None:
    for value, body, expected in (
        ("yes", BODY, "'true' or 'false'"),
        ("", BODY, "'true' or 'false'"),
        ("true", {**BODY, "stream": False}, '"stream": true'),
    ):
        headers = {"X-Farsight-Resumable": value, **service.bearer("a")}
        reply = await service.clients[0].post("/v1/completions", json=body, headers=headers)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "X-Farsight-Resumable"
        assert expected in reply.json()["error"]["message"]
    assert service.backend.num_opened == 0


async def test_only_the_tenant_that_began_a_stream_finds_it(service: Service) -> None:
    service.backend.allow(4)
    stream_id = (await service.begin("a")).headers["X-Farsight-Stream"]
    unknown = error_of(await service.resume("f" * 32, "b"))
    assert unknown == (404, "stream_not_found")
    for replica in (0, 1):
        assert error_of(await service.resume(stream_id, "b", replica=replica)) == unknown
        for wrong in (stream_id[:-1], stream_id + "0", stream_id.upper(), "..%2f..%2fstatus", "%00", "x" * 5000):
            assert (await service.resume(wrong, "b", replica=replica)).status_code == 404
    same_tenant = (await service.resume(stream_id, "a2")).status_code
    assert same_tenant == (404 if service.doors[0].is_open else 200)
    without = (await service.resume(stream_id)).status_code
    assert without == (404 if service.doors[0].is_open else 401)
    if not service.doors[0].is_open:
        assert (await service.resume(stream_id, "observe")).status_code == 403
    assert (await service.resume(stream_id, "a")).status_code == 200


@pytest.mark.parametrize("last", ["1", "f" * 32 + "-1", "{id}-0", "{id}-99", "{id}-1x", "{id}", "{id}-" + "9" * 40])
async def test_a_wrong_last_event_id_is_400(service: Service, last: str) -> None:
    service.backend.allow(4)
    stream_id = (await service.begin("a")).headers["X-Farsight-Stream"]
    for replica in (0, 1):
        reply = await service.resume(stream_id, "a", last.replace("{id}", stream_id), replica)
        assert error_of(reply) == (400, "invalid_value")
        assert reply.json()["error"]["param"] == "Last-Event-ID"
    assert (await service.resume(stream_id, "a")).status_code == 200


async def test_a_request_without_a_client_counts_as_in_flight(service: Service) -> None:
    """``max_in_flight`` is 1: a tenant cannot run more by leaving its streams."""
    if service.doors[0].is_open:
        pytest.skip("nothing is counted without keys")
    service.backend.allow(1)
    began = asyncio.create_task(service.begin("a"))
    async with asyncio.timeout(60):
        while not any(live.is_shown for live in service.keepers[0]._streams.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    (stream_id,) = service.keepers[0]._streams
    began.cancel()
    await asyncio.gather(began, return_exceptions=True)
    refused = await service.clients[0].post("/v1/completions", json=BODY, headers=service.bearer("a2"))
    assert error_of(refused) == (429, "rate_limit_exceeded")
    service.backend.allow(3)
    async with asyncio.timeout(60):
        while not service.keepers[0]._streams[stream_id].ended:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    service.backend.allow(4)
    admitted = await service.clients[0].post("/v1/completions", json=BODY, headers=service.bearer("a2"))
    assert admitted.status_code == 200
    whole = await service.resume(stream_id, "a", replica=0)
    assert "".join(json.loads(data)["choices"][0]["text"] for _, data in events_of(whole.content)[:-1]) == "0 1 2 3 "


async def test_a_continued_stream_counts_each_token_once(service: Service) -> None:
    if service.doors[0].is_open:
        pytest.skip("nothing is counted without keys")
    service.backend.allow(2)
    began = asyncio.create_task(service.begin("b"))
    async with asyncio.timeout(60):
        while not any(live.num_stored == 2 for live in service.keepers[0]._streams.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    (stream_id,) = service.keepers[0]._streams
    service.backend.allow(100)  # the first replica may take some before it hears that the stream was taken
    reply = await service.resume(stream_id, "b", f"{stream_id}-2")
    assert len(events_of(reply.content)) >= 1
    await asyncio.gather(began, return_exceptions=True)
    used = [door.budget(Tenant("b")).counts(door.now()) for door in service.doors]
    prompts = [counts.prompt_tokens for counts in used]
    assert prompts[0] > 0
    assert prompts[1] == 0
