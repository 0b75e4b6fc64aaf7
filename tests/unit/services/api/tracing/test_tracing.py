"""Spans as a collector of OTLP gets them, and the access log: what of a request leaves, and none of its words."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client import CollectorRegistry

from farsight.actors.external.openai_wire import by_tokens
from farsight.actors.runtime.log_lines import log_fields
from farsight.core.codec import decode, encode
from farsight.core.config.server import TracesConfig
from farsight.core.decisions import Decision
from farsight.core.errors import ConfigError
from farsight.core.request import Origin, Request, SamplingParams
from farsight.services.api.requests import unnamed_request
from farsight.services.api.text.prompts import PromptEncoder
from farsight.services.api.tracing import exporter as exporting
from farsight.services.api.tracing.exporter import SpanExporter
from tests.free_ports import free_port
from tests.unit.services.api.api_support import HELLO, MODEL, ScriptedBackend, client_on, delta, until, whole_app
from tests.unit.services.api.test_api_explain import trace_of

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SECRET = "a prompt that no collector may read"


class Collector:
    """What it got, decoded."""

    def __init__(self) -> None:
        self.spans: asyncio.Queue[Any] = asyncio.Queue()
        self.status = 200
        self.answers = asyncio.Event()
        self.answers.set()
        self.services: list[str] = []
        self.bodies: list[bytes] = []

    async def take(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.read())
        message = ExportTraceServiceRequest.FromString(self.bodies[-1])
        for group in message.resource_spans:
            self.services += [each.value.string_value for each in group.resource.attributes]
            for scope in group.scope_spans:
                for span in scope.spans:
                    self.spans.put_nowait(span)
        await self.answers.wait()
        return web.Response(status=self.status)


@pytest.fixture
async def collector() -> AsyncIterator[tuple[Collector, str]]:
    made, port = Collector(), free_port()
    app = web.Application()
    app.router.add_post("/v1/traces", made.take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    yield made, f"http://127.0.0.1:{port}/v1/traces"
    await runner.cleanup()


class Explaining(ScriptedBackend):
    """Knows decisions about every answer."""

    async def explain(self, response_id: str) -> Any:
        decisions = [
            Decision("received", 100.0, {"prompt_tokens": 5, "max_new_tokens": 16}),
            Decision("admitted", 100.5, {"waited_s": 0.5, "num_admitted": 1, "num_waiting": 0}),
            Decision("first_token", 100.6, {"ttft_s": 0.6}),
            Decision("answered", 101.0, {"jct_s": 1.0, "ttft_s": 0.6, "output_tokens": 4, "reason": "stop"}),
        ]
        return (trace_of(Origin(response_id), "ingress", *decisions),)


class Traced:
    """An application whose spans go to a collector."""

    def __init__(self, endpoint: str, encoder: PromptEncoder, sample: float = 1.0) -> None:
        self.backend, self.registry = Explaining(), CollectorRegistry()
        self.spans = SpanExporter(TracesConfig(endpoint, sample, "here"), self.backend, self.registry)
        self.http = client_on(whole_app(self.backend, encoder, spans=self.spans))

    def counted(self, what: str) -> float | None:
        return self.registry.get_sample_value(f"farsight:spans_{what}_total")


@pytest.fixture
async def traced(
    collector: tuple[Collector, str], encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Traced]:
    monkeypatch.setattr(exporting, "SETTLE_S", 0.01)
    opened = Traced(collector[1], encoder)
    sending = asyncio.create_task(opened.spans.run())
    yield opened
    sending.cancel()
    await asyncio.wait([sending])


def attributes(owner: Any) -> dict[str, Any]:
    found = {}
    for each in owner.attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [one.string_value for one in value.values] if kind == "array_value" else value
    return found


def chat(**change: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": SECRET}], "max_tokens": 7} | change


@pytest.mark.parametrize("stream", [False, True])
async def test_a_span_has_the_request_and_every_decision(
    traced: Traced, collector: tuple[Collector, str], stream: bool
) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    reply = await traced.http.post("/v1/chat/completions", json=chat(stream=stream), headers=headers)
    assert reply.status_code == 200
    span = await collector[0].spans.get()
    assert all(text.encode() not in body for text in (SECRET, "Hello!") for body in collector[0].bodies)
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.name) == (TRACE, PARENT, f"chat {MODEL}")
    assert span.start_time_unix_nano < span.end_time_unix_nano and collector[0].services == ["here"]
    known = attributes(span)
    assert known["gen_ai.operation.name"] == "chat" and known["gen_ai.request.max_tokens"] == 7
    assert known["gen_ai.response.id"].startswith("chatcmpl-") and known["gen_ai.usage.output_tokens"] == 4
    assert known["gen_ai.response.finish_reasons"] == ["stop"] and known["http.response.status_code"] == 200
    assert [event.name for event in span.events] == [
        f"farsight.decision.{kind}" for kind in ("received", "admitted", "first_token", "answered")
    ]
    admitted = span.events[1]
    assert admitted.time_unix_nano == 100_500_000_000
    assert attributes(admitted)["farsight.decision.waited_s"] == 0.5
    [origin] = traced.backend.origins
    assert origin is not None and origin.traceparent == f"00-{TRACE}-{span.span_id.hex()}-01"


async def test_a_refused_request_has_a_span_too_and_a_broken_header_counts_as_none(
    traced: Traced, collector: tuple[Collector, str], caplog: pytest.LogCaptureFixture
) -> None:
    body = {"model": "other", "prompt": "a"}
    await traced.http.post("/v1/completions", json=body, headers={"traceparent": "0" * 1000})
    span = await collector[0].spans.get()
    assert span.name == "POST /v1/completions" and attributes(span)["error.type"] == "404" and not span.events
    assert span.parent_span_id == b"" and not [each for each in caplog.records if each.name.startswith("opentelemetry")]


@pytest.mark.parametrize(
    ("sample", "version", "flags", "has_span"),
    [(0.0, "00", "01", True), (0.0, "01", "01-more", True), (1.0, "00", "00", False), (0.0, "ff", "01", False)],
)
async def test_a_client_decides_whether_there_is_a_span_and_without_it_the_share_does(
    encoder: PromptEncoder, sample: float, version: str, flags: str, has_span: bool
) -> None:
    traced = Traced("http://127.0.0.1:1/", encoder, sample)
    header = f"{version}-{TRACE}-{PARENT}-{flags}"
    await traced.http.post("/v1/chat/completions", json=chat(), headers={"traceparent": header})
    await traced.http.get("/v1/models")
    [origin] = traced.backend.origins
    assert origin is not None and origin.traceparent.startswith(f"00-{TRACE}-") == has_span == bool(origin.traceparent)
    assert len(traced.spans._waiting) == has_span


@pytest.mark.parametrize("status", [400, 302])
async def test_what_the_collector_refuses_is_dropped_and_the_next_goes(
    traced: Traced, collector: tuple[Collector, str], caplog: pytest.LogCaptureFixture, status: int
) -> None:
    collector[0].status = status
    for _ in range(2):
        await traced.http.post("/v1/chat/completions", json=chat())
        await collector[0].spans.get()
    await until(lambda: traced.counted("dropped") == 2)
    assert len([each for each in caplog.records if each.name == exporting.__name__]) == 1
    collector[0].status = 200
    await traced.http.post("/v1/chat/completions", json=chat())
    await until(lambda: traced.counted("sent") == 1)


async def test_no_request_waits_for_a_collector_and_what_it_is_too_slow_for_is_dropped(
    traced: Traced, collector: tuple[Collector, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    collector[0].answers.clear()
    await traced.http.post("/v1/chat/completions", json=chat())
    await collector[0].spans.get()
    monkeypatch.setattr(exporting, "MAX_WAITING", 2)
    for num_dropped in (0, 0, 1, 2):
        await traced.http.post("/v1/chat/completions", json=chat())
        assert traced.counted("dropped") == num_dropped
    collector[0].answers.set()
    await until(lambda: traced.counted("sent") == 3)


def test_the_trace_crosses_the_wire_and_reaches_the_server_behind() -> None:
    origin = Origin("cmpl-1", 0, b"", f"00-{TRACE}-{PARENT}-01")
    request = dataclasses.replace(unnamed_request((1, 2), SamplingParams(4)), origin=origin)
    arrived = decode(encode(request), Request)
    assert by_tokens(arrived, "model").traceparent == origin.traceparent


@pytest.mark.parametrize(("field", "value"), [("endpoint", "localhost:4318"), ("sample", 1.5), ("sample", -0.1)])
def test_wrong_settings_are_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"traces.{field}"):
        TracesConfig(**{field: value})


PROMPT = "a prompt that no log may hold"
ANSWER = "an answer that no log may hold"


def lines_of(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """Access lines as the log has them."""
    found = [log_fields(record, "ingress-1") for record in caplog.records]
    return [each for each in found if each["logger"].endswith("access_log")]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_line_has_the_id_of_the_answer(
    encoder: PromptEncoder, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    client = client_on(whole_app(ScriptedBackend(HELLO), encoder, access_log=True))
    reply = await client.post("/v1/completions", json={"prompt": "One", "max_tokens": 4, "stream": stream})
    answer = reply.text.removeprefix("data: ").splitlines()[0] if stream else reply.text
    [line] = lines_of(caplog)
    assert line["request_id"] == json.loads(answer)["id"]
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/completions", 200)
    assert line["took_s"] >= 0


async def test_neither_prompts_nor_answers_nor_keys_get_into_any_log(
    encoder: PromptEncoder, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    steps = (delta(ANSWER), RuntimeError(ANSWER))
    transport = httpx.ASGITransport(
        whole_app(ScriptedBackend(steps), encoder, access_log=True), raise_app_exceptions=False
    )
    messages = [{"role": "user", "content": PROMPT}]
    bodies = (
        {"model": MODEL, "messages": messages, "stream": True},
        {"model": MODEL, "messages": messages},
        {"model": MODEL, "messages": messages, "max_tokens": PROMPT},
        {"model": PROMPT, "messages": messages},
    )
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        for body in bodies:
            await http.post(f"/v1/chat/completions?key={PROMPT}", json=body, headers={"Authorization": "Bearer sk-1"})
        await http.post("/v1/chat/completions", content=f'{{"messages": "{PROMPT}'.encode())
    assert len(lines_of(caplog)) == 5
    logged = "".join(json.dumps(log_fields(each, "ingress-1")) for each in caplog.records if each.name != "httpx")
    for words in (PROMPT, ANSWER, "sk-1"):
        assert words not in logged
