"""The span of the request that a task serves. Does not load the library of spans, which most servers do without."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.api.generation import Generation

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import Span


@dataclass(slots=True)
class TracedAnswer:
    """A request that gets a span.

    Attributes:
        traceparent: W3C trace context of the span, for servers that the request is passed on to.
        path: Path of its URL.
        status: Status of the HTTP answer; 0 if the client left before.
        ended_ns: Nanoseconds since the epoch; 0 while it runs.
        generation: What it asks for; None until its body has been understood.
    """

    span: Span
    traceparent: str
    path: str
    status: int = 0
    ended_ns: int = 0
    generation: Generation | None = None


TRACED: ContextVar[TracedAnswer | None] = ContextVar("farsight_traced", default=None)
"""Set for the task that serves a request; None for a request that gets no span."""


def traced(generation: Generation) -> Generation:
    """Returns the generation, whose requests name their trace from now on if the client's request has a span."""
    answer = TRACED.get()
    if answer is None:
        return generation
    answer.generation = generation.in_trace(answer.traceparent)
    return answer.generation
