"""The span of a request in OTLP, with the names of OpenTelemetry's conventions for generative AI."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from farsight.services.api.answers.served import TracedAnswer
from farsight.services.api.generation import Generation
from farsight.services.api.pages.explain import Explanation

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
        "kind": Span.SPAN_KIND_SERVER,
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
