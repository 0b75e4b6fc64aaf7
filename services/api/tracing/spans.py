"""The span of a request in OTLP, with the names of OpenTelemetry's conventions for generative AI."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from services.api.answers.trace_context import TraceContext
from services.api.generation import Generation
from services.api.pages.explain import Explanation

if TYPE_CHECKING:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    from opentelemetry.proto.trace.v1.trace_pb2 import Span

SCOPE = "farsight"
EVENT = "farsight.decision."
"""Prefix of the names of events; the rest is the kind of the decision."""

_NS = 1_000_000_000

Value = str | int | float | Sequence[str]


@dataclass(frozen=True, slots=True)
class EndedAnswer:
    """What is known of a request once its HTTP answer has been sent.

    Attributes:
        path: Path of its URL.
        status: Status of the HTTP answer; 0 if the client left before.
        began_ns, ended_ns: Nanoseconds since the epoch.
        generation: None if its body was refused.
        explanation: None if no decision about it is known.
    """

    context: TraceContext
    path: str
    status: int
    began_ns: int
    ended_ns: int
    generation: Generation | None = None
    explanation: Explanation | None = None


def export_request(service: Mapping[str, str], answers: Sequence[EndedAnswer]) -> ExportTraceServiceRequest:
    """The message that a collector takes.

    Args:
        service: Attributes of this process, such as ``service.name``.
    """
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    message = ExportTraceServiceRequest()
    group = message.resource_spans.add()
    _fill(group.resource.attributes, service)
    scope = group.scope_spans.add()
    scope.scope.name = SCOPE
    for answer in answers:
        _write(scope.spans.add(), answer)
    return message


def _write(span: Span, answer: EndedAnswer) -> None:
    from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

    span.trace_id, span.span_id, span.parent_span_id = _ids(answer.context)
    span.name = _name(answer)
    span.kind = Span.SPAN_KIND_SERVER
    span.start_time_unix_nano, span.end_time_unix_nano = answer.began_ns, answer.ended_ns
    _fill(span.attributes, dict(_attributes(answer)))
    if answer.status >= 500:
        span.status.code = Status.STATUS_CODE_ERROR
    if answer.explanation is not None:
        _write_events(span, answer.explanation)


def _write_events(span: Span, explanation: Explanation) -> None:
    for choice in explanation.choices:
        for decision in choice.decisions:
            event = span.events.add()
            event.name = f"{EVENT}{decision.kind}"
            event.time_unix_nano = int((explanation.received_at + decision.at_s) * _NS)
            facts: dict[str, Value] = dict(decision.facts)
            facts |= {"choice": choice.index, "by": decision.by, "attempt": decision.attempt, "text": decision.text}
            _fill(event.attributes, {f"{EVENT}{name}": value for name, value in facts.items()})


def _ids(context: TraceContext) -> tuple[bytes, bytes, bytes]:
    return context.trace_id, context.span_id, context.parent_id


def _name(answer: EndedAnswer) -> str:
    generation = answer.generation
    return f"POST {answer.path}" if generation is None else f"{_operation(generation)} {generation.model}"


def _operation(generation: Generation) -> str:
    return "chat" if generation.chat else "text_completion"


def _attributes(answer: EndedAnswer) -> Iterator[tuple[str, Value]]:
    yield "http.request.method", "POST"
    yield "url.path", answer.path
    if answer.status:
        yield "http.response.status_code", answer.status
    if answer.status >= 400:
        yield "error.type", str(answer.status)
    if answer.generation is not None:
        yield from _asked(answer.generation)
    if answer.explanation is not None:
        yield from _answered(answer.explanation)


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


def _fill(target: Any, values: Mapping[str, Value]) -> None:
    for name, value in values.items():
        entry = target.add()
        entry.key = name
        if isinstance(value, str):
            entry.value.string_value = value
        elif isinstance(value, int):
            entry.value.int_value = value
        elif isinstance(value, float):
            entry.value.double_value = value
        else:
            for each in value:
                entry.value.array_value.values.add().string_value = each
