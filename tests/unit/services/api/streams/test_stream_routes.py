"""The header that asks for a resumable stream, ``GET /v1/streams/{id}``, and the example that resumes."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from starlette.types import Message

from farsight.services.api.access.access_control import AccessControl, AccessSettings
from farsight.services.api.access.keys import Role, Tenant
from farsight.services.api.answers import sse
from farsight.services.api.streams.manager import StreamManager
from farsight.services.api.text.prompts import PromptEncoder
from tests.unit.services.api.access.access_support import add_key
from tests.unit.services.api.api_support import MODEL, client_on, until, whole_app
from tests.unit.services.api.streams.stream_support import PacedBackend, ShelfStore, events_of

RESUMABLE = {"X-Farsight-Resumable": "true"}
BODY = {"model": MODEL, "prompt": "hello", "max_tokens": 4, "stream": True, "temperature": 0}


@dataclass
class Service:
    """Two ingress replicas over one store; ``access`` of the first."""

    clients: list[httpx.AsyncClient]
    backend: PacedBackend
    keys: dict[str, str]
    accesses: list[AccessControl]
    managers: list[StreamManager]
    store: ShelfStore

    def bearer(self, name: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.keys[name]}"} if name else {}

    async def begin(self, name: str = "", path: str = "completions", **fields: Any) -> httpx.Response:
        headers = {**RESUMABLE, **self.bearer(name)}
        said = {} if path == "completions" else {"prompt": None, "messages": [{"role": "user", "content": "hi"}]}
        return await self.clients[0].post(f"/v1/{path}", json={**BODY, **said, **fields}, headers=headers)

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
    scope = {"type": "http", "http_version": "1.1", "method": method, "path": path, "raw_path": path.encode()}
    scope |= {"query_string": b"", "scheme": "http", "server": ("test", 80), "client": ("127.0.0.1", 1)}
    scope["headers"] = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
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
    settings = AccessSettings(key_file=path if request.param == "keys" else None)
    backend, store = PacedBackend(), ShelfStore()
    accesses, managers = [AccessControl(settings) for _ in range(2)], [StreamManager(store) for _ in range(2)]
    apps = [whole_app(backend, encoder, access=accesses[i], manager=managers[i]) for i in range(2)]
    clients = [client_on(app) for app in apps]
    running = [asyncio.create_task(manager.run()) for manager in managers]
    yield Service(clients, backend, keys, accesses, managers, store)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def error_of(reply: httpx.Response) -> tuple[int, str]:
    return reply.status_code, reply.json()["error"]["code"]


@pytest.mark.parametrize(("path", "num_events"), [("completions", 6), ("chat/completions", 7)])
async def test_a_stream_is_read_again_from_any_event_at_any_replica(
    service: Service, path: str, num_events: int
) -> None:
    """The first delta of a chat is two events: its role comes alone."""
    service.backend.allow(4)
    reply = await service.begin("a", path, stream_options={"include_usage": True})
    assert reply.status_code == 200
    stream_id = reply.headers["X-Farsight-Stream"]
    assert re.fullmatch("[0-9a-f]{32}", stream_id), "128 random bits"
    events = events_of(reply.content)
    assert [event_id for event_id, _ in events] == [f"{stream_id}-{number + 1}" for number in range(num_events)]
    for replica in (0, 1, 0):
        for number, (event_id, _) in enumerate(events[:-1]):
            again = await service.resume(stream_id, "a", event_id, replica)
            assert again.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert events_of(again.content) == events[number + 1 :]
        assert events_of((await service.resume(stream_id, "a", replica=replica)).content) == events
        nothing = await service.resume(stream_id, "a", events[-1][0], replica)
        assert (nothing.status_code, nothing.content) == (204, b"")


async def test_the_role_of_a_chat_comes_before_its_first_token_is_counted(service: Service) -> None:
    service.backend.allow(4)
    options = {"include_usage": True, "continuous_usage_stats": True}
    reply = await service.begin("a", "chat/completions", stream_options=options)
    role, first = (json.loads(data)["usage"]["completion_tokens"] for _, data in events_of(reply.content)[:2])
    assert (role, first) == (0, 1)


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
    await until(lambda: service.backend.num_opened)
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
    assert same_tenant == (404 if service.accesses[0].is_open else 200)
    without = (await service.resume(stream_id)).status_code
    assert without == (404 if service.accesses[0].is_open else 401)
    if not service.accesses[0].is_open:
        assert (await service.resume(stream_id, "observe")).status_code == 403
    assert (await service.resume(stream_id, "a")).status_code == 200


@pytest.mark.parametrize(
    "last", ["1", "x", "-1", "f" * 32 + "-1", "{id}-0", "{id}-99", "{id}-1x", "{id}", "{id}-" + "9" * 40]
)
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
    if service.accesses[0].is_open:
        pytest.skip("nothing is counted without keys")
    service.backend.allow(1)
    began = asyncio.create_task(service.begin("a"))
    await until(lambda: any(live.is_shown for live in service.managers[0]._streams.values()))
    (stream_id,) = service.managers[0]._streams
    began.cancel()
    await asyncio.gather(began, return_exceptions=True)
    refused = await service.clients[0].post("/v1/completions", json=BODY, headers=service.bearer("a2"))
    assert error_of(refused) == (429, "rate_limit_exceeded")
    service.backend.allow(3)
    await until(lambda: service.managers[0]._streams[stream_id].ended)
    service.backend.allow(4)
    admitted = await service.clients[0].post("/v1/completions", json=BODY, headers=service.bearer("a2"))
    assert admitted.status_code == 200
    whole = await service.resume(stream_id, "a", replica=0)
    assert "".join(json.loads(data)["choices"][0]["text"] for _, data in events_of(whole.content)[:-1]) == "0 1 2 3 "


async def test_a_continued_stream_counts_each_token_once(service: Service) -> None:
    if service.accesses[0].is_open:
        pytest.skip("nothing is counted without keys")
    service.backend.allow(2)
    began = asyncio.create_task(service.begin("b"))
    await until(lambda: any(live.num_stored == 2 for live in service.managers[0]._streams.values()))
    (stream_id,) = service.managers[0]._streams
    service.backend.allow(100)  # the first replica may take some before it hears that the stream was taken
    reply = await service.resume(stream_id, "b", f"{stream_id}-2")
    assert len(events_of(reply.content)) >= 1
    await asyncio.gather(began, return_exceptions=True)
    used = [access.budget(Tenant("b")).counts(access.now()) for access in service.accesses]
    prompts = [counts.prompt_tokens for counts in used]
    assert prompts[0] > 0
    assert prompts[1] == 0


def example() -> ModuleType:
    """The example by its path: another package may be called ``examples`` as well."""
    path = Path(__file__).parents[5] / "examples" / "resuming.py"
    spec = importlib.util.spec_from_file_location("resuming_example", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


resuming = example()
STREAM_ID = "a" * 32
EVENTS = [f'id: {STREAM_ID}-{number}\ndata: {{"choices": [{{"text": "{number} "}}]}}\n\n' for number in (1, 2, 3)]
EVENTS.append(f"id: {STREAM_ID}-4\ndata: [DONE]\n\n")
ASKED = {"model": "m", "prompt": "hello", "stream": True}


class Broken(httpx.SyncByteStream):
    """Sends some bytes, then breaks."""

    def __init__(self, data: str) -> None:
        self._data = data

    def __iter__(self) -> Iterator[bytes]:
        if self._data:
            yield self._data.encode()
        raise httpx.ReadError("connection reset")


class Server(httpx.BaseTransport):
    """Answers with what it is given, one after the other, and notes what was asked."""

    def __init__(self, *answers: int | httpx.SyncByteStream | Exception) -> None:
        self._answers = list(answers)
        self.asked: list[tuple[str, str]] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append((request.method, request.headers.get("Last-Event-ID", "")))
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, int):
            return httpx.Response(answer, json={"error": {"message": "no"}})
        return httpx.Response(200, headers={"X-Farsight-Stream": STREAM_ID}, stream=answer)


def all_events(after: int = 0) -> httpx.ByteStream:
    return httpx.ByteStream("".join(EVENTS[after:]).encode())


def read_from(server: Server) -> str:
    client = httpx.Client(transport=resuming.ResumingTransport(server))
    with client.stream("POST", "http://test/v1/completions", json=ASKED) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines)


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming, "RETRY_S", 0.0)


@pytest.mark.parametrize(
    ("answers", "asked"),
    [
        ([Broken(EVENTS[0] + EVENTS[1][:20]), all_events(1)], [("POST", ""), ("GET", f"{STREAM_ID}-1")]),
        ([Broken(""), all_events()], [("POST", ""), ("GET", "")]),
        ([Broken(""), 503, Broken(""), all_events()], [("POST", ""), ("GET", ""), ("GET", ""), ("GET", "")]),
        ([httpx.ReadError("reset"), all_events()], [("POST", ""), ("POST", "")]),
        ([Broken(""), 404, all_events()], [("POST", ""), ("GET", ""), ("POST", "")]),
        (
            [Broken(""), 404, Broken(""), 404, all_events()],
            [("POST", ""), ("GET", ""), ("POST", ""), ("GET", ""), ("POST", "")],
        ),
    ],
    ids=["an event", "headers", "headers, twice", "before the headers", "unknown", "unknown, twice"],
)
def test_nothing_is_missing_wherever_a_connection_breaks(
    answers: list[int | httpx.SyncByteStream | Exception], asked: list[tuple[str, str]]
) -> None:
    server = Server(*answers)
    assert read_from(server) == "1 2 3 "
    assert server.asked == asked


def test_a_stream_that_is_lost_after_an_event_is_an_error() -> None:
    with pytest.raises(httpx.ReadError, match="cannot be resumed"):
        read_from(Server(Broken(EVENTS[0]), 404))
