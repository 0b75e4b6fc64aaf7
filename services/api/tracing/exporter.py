"""Sends spans to a collector, beside the requests: what a collector is slow with or refuses is dropped and counted.

Importing this module loads OpenTelemetry's SDK: only an ingress with ``[traces] endpoint`` does. The SDK reads trace
contexts, samples and draws ids. Its batches and its exporter are not used: spans wait here for their decisions anyway,
and its exporter takes 2.6 times the processor time for a message, a twentieth of a short request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import aiohttp
from opentelemetry.context import Context
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Span, TracerProvider
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import CollectorRegistry, Counter

from farsight.core.config.server import TracesConfig
from farsight.core.errors import FarsightError
from farsight.services.api.answers.served import TracedAnswer
from farsight.services.api.backend import Operator
from farsight.services.api.generation import Generation
from farsight.services.api.pages.explain import Explanation, explanation

MAX_WAITING = 2048
"""Spans that wait to be sent; later ones are dropped."""

MAX_BATCH = 128
SETTLE_S = 1.5
"""After the end of an answer all decisions about it have reached the log."""

SEND_S = 10.0
MAX_HEADER = 512
"""Characters of a ``traceparent`` that are read; the library would log longer ones."""

_PROPAGATOR = TraceContextTextMapPropagator()

logger = logging.getLogger(__name__)


class SpanExporter:
    """Opens spans, holds ended ones until their decisions are in the log, then sends them.

    Args:
        operator: Is asked for the decisions.
    """

    def __init__(self, config: TracesConfig, operator: Operator, registry: CollectorRegistry) -> None:
        self._config = config
        self._operator = operator
        sampler, resource = ParentBased(TraceIdRatioBased(config.sample)), Resource.get_empty()
        self._tracer = TracerProvider(sampler, resource, shutdown_on_exit=False).get_tracer(__name__)
        self._waiting: deque[TracedAnswer] = deque()
        self._sent = Counter("farsight:spans_sent", "Spans that the collector took.", registry=registry)
        self._dropped = Counter("farsight:spans_dropped", "Spans that were not sent.", registry=registry)
        self._failing = False

    def start(self, path: str, traceparent: str) -> TracedAnswer | None:
        """Opens the span of a request; None if it gets none. A client's decision to sample or not stands.

        Args:
            traceparent: The client's header; one that breaks the rules counts as none, as the standard asks.
        """
        nobody = Context()  # without it the library takes a span that Ray may have opened for the task
        parent = _PROPAGATOR.extract({"traceparent": traceparent[:MAX_HEADER]}, nobody)
        span = self._tracer.start_span(f"POST {path}", parent)
        if not isinstance(span, Span):
            return None
        passed_on: dict[str, str] = {}
        _PROPAGATOR.inject(passed_on, set_span_in_context(span, nobody))
        return TracedAnswer(span, passed_on["traceparent"], path)

    def finish(self, answer: TracedAnswer) -> None:
        """Takes a span whose answer has been sent; never waits."""
        answer.ended_ns = time.time_ns()
        if len(self._waiting) >= MAX_WAITING:
            self._dropped.inc()
        else:
            self._waiting.append(answer)

    async def run(self) -> None:
        """Sends until cancelled."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=SEND_S)) as session:
            while True:
                batch = [self._waiting.popleft() for _ in range(min(MAX_BATCH, len(self._waiting)))]
                await asyncio.sleep(SETTLE_S)
                if batch:
                    await self._send(session, batch)

    async def _send(self, session: aiohttp.ClientSession, batch: list[TracedAnswer]) -> None:
        """Sends one message with these spans."""
        spans = [span_fields(answer, await self._explain(answer)) for answer in batch]
        body = export_request(self._config.service_name, spans)
        headers = {"Content-Type": "application/x-protobuf"}
        try:
            async with session.post(self._config.endpoint, data=body, headers=headers, allow_redirects=False) as reply:
                if not 200 <= reply.status < 300:
                    raise aiohttp.ClientError(f"status {reply.status}")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self._dropped.inc(len(batch))
            if not self._failing:  # logged once, not for every batch
                logger.warning("spans cannot be sent to %s: %s", self._config.endpoint, error or type(error).__name__)
            self._failing = True
        else:
            self._sent.inc(len(batch))
            self._failing = False

    async def _explain(self, answer: TracedAnswer) -> Explanation | None:
        if answer.generation is None:
            return None
        try:
            traces = await self._operator.explain(answer.generation.response_id)
        except FarsightError:
            return None  # the span goes without decisions
        return explanation(answer.generation.response_id, traces) if traces else None


EVENT = "farsight.decision."
"""Prefix of the names of events; the rest is the kind of the decision."""

_NS = 1_000_000_000

Value = str | int | float | Sequence[str]
Fields = dict[str, Any]
"""What the constructor of a message takes: protobuf fills a tree of them in one call."""


def export_request(service_name: str, spans: Sequence[Fields]) -> bytes:
    """Returns the message that a collector takes."""
    resource = {"attributes": _pairs([("service.name", service_name)])}
    group: Any = {"resource": resource, "scope_spans": [{"scope": {"name": "farsight"}, "spans": spans}]}
    return bytes(ExportTraceServiceRequest(resource_spans=[group]).SerializeToString())


def span_fields(answer: TracedAnswer, explanation: Explanation | None) -> Fields:
    """Returns the span of a request.

    Args:
        explanation: None if no decision about it is known.
    """
    context, parent, generation = answer.span.get_span_context(), answer.span.parent, answer.generation
    return {
        "trace_id": context.trace_id.to_bytes(16),
        "span_id": context.span_id.to_bytes(8),
        "parent_span_id": b"" if parent is None else parent.span_id.to_bytes(8),
        "name": answer.span.name if generation is None else f"{_operation(generation)} {generation.model}",
        "kind": SpanMessage.SPAN_KIND_SERVER,
        "start_time_unix_nano": answer.span.start_time,
        "end_time_unix_nano": answer.ended_ns,
        "attributes": _pairs(_attributes(answer, explanation)),
        "status": {"code": Status.STATUS_CODE_ERROR if answer.status >= 500 else Status.STATUS_CODE_UNSET},
        "events": [] if explanation is None else list(_events(explanation)),
    }


def _events(explanation: Explanation) -> Iterator[Fields]:
    for choice in explanation.choices:
        for decision in choice.decisions:
            facts: dict[str, Value] = dict(decision.facts)
            facts |= {"choice": choice.index, "by": decision.by, "attempt": decision.attempt, "text": decision.text}
            yield {
                "name": f"{EVENT}{decision.kind}",
                "time_unix_nano": int((explanation.received_at + decision.at_s) * _NS),
                "attributes": _pairs((f"{EVENT}{name}", value) for name, value in facts.items()),
            }


def _operation(generation: Generation) -> str:
    return "chat" if generation.chat else "text_completion"


def _attributes(answer: TracedAnswer, explanation: Explanation | None) -> Iterator[tuple[str, Value]]:
    yield "http.request.method", "POST"
    yield "url.path", answer.path
    if answer.status:
        yield "http.response.status_code", answer.status
    if answer.status >= 400:
        yield "error.type", str(answer.status)
    if answer.generation is not None:
        yield from _asked(answer.generation)
    if explanation is not None:
        yield from _answered(explanation)


def _asked(generation: Generation) -> Iterator[tuple[str, Value]]:
    sampling = generation.prompts[0].sampling
    yield "gen_ai.operation.name", _operation(generation)
    yield "gen_ai.provider.name", "farsight"
    yield "gen_ai.request.model", generation.model
    yield "gen_ai.response.model", generation.model
    yield "gen_ai.response.id", generation.response_id
    yield "gen_ai.request.choice.count", generation.n
    yield "gen_ai.request.max_tokens", sampling.max_new_tokens
    yield "gen_ai.request.temperature", float(sampling.temperature)
    yield "gen_ai.request.top_p", float(sampling.top_p)
    yield "gen_ai.usage.input_tokens", generation.num_prompt_tokens


def _answered(explanation: Explanation) -> Iterator[tuple[str, Value]]:
    summaries = [choice.summary for choice in explanation.choices]
    yield "gen_ai.usage.output_tokens", sum(summary.output_tokens or 0 for summary in summaries)
    reasons = [summary.finish_reason for summary in summaries if summary.finish_reason is not None]
    if reasons:
        yield "gen_ai.response.finish_reasons", reasons
    firsts = [summary.ttft_s for summary in summaries if summary.ttft_s is not None]
    if firsts:
        yield "farsight.ttft_s", min(firsts)
    yield "farsight.waited_s", max((summary.waited_s for summary in summaries), default=0.0)
    yield "farsight.num_preemptions", sum(summary.num_preemptions for summary in summaries)
    yield "farsight.num_resumptions", sum(summary.num_resumptions for summary in summaries)


def _pairs(attributes: Iterable[tuple[str, Value]]) -> list[Fields]:
    return [{"key": name, "value": _value(value)} for name, value in attributes]


def _value(value: Value) -> Fields:
    if isinstance(value, str):
        return {"string_value": value}
    if isinstance(value, int):
        return {"int_value": value}
    if isinstance(value, float):
        return {"double_value": value}
    return {"array_value": {"values": [_value(each) for each in value]}}
