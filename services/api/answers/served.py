"""What the task that serves an answer notes beside it: its id for the log, the promise of its end, its span.

Does not load the library of spans, which most servers do without.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from farsight.core.messages.requests import Promise, last_end
from farsight.services.api.generation import Generation

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import Span


@dataclass(slots=True)
class ServedRequest:
    """A request of which a log line will tell; ``response_id`` is empty until its body has been understood."""

    response_id: str = ""


SERVED: ContextVar[ServedRequest | None] = ContextVar("farsight_served", default=None)
"""Set for the task that serves a request; None where no access log is written."""


def served(response_id: str) -> None:
    """Notes the id of the answer that this task gives."""
    request = SERVED.get()
    if request is not None:
        request.response_id = response_id


HEADERS: Mapping[str, str] = {
    "farsight-eta-p50": "Seconds from the start of the request by which it has ended with probability one half.",
    "farsight-eta-p90": "Seconds by which it has ended with probability 0.9.",
    "farsight-eta-coarse": "'true' where the queue was too long to be rolled forward request by request; else absent.",
}
"""Response headers and their meaning; absent where nothing could be predicted."""


class AnswerPromise:
    """The promises of the requests behind one answer, as the backend gets them.

    Args:
        num_requests: Requests of the answer; there is no promise before each of them has one.
    """

    def __init__(self, num_requests: int) -> None:
        self._num_requests = num_requests
        self._made: dict[str, Promise] = {}

    def add(self, promise: Promise) -> None:
        """Takes the first promise of each request; the promises of later attempts change no header."""
        self._made.setdefault(promise.request_id, promise)

    def headers(self) -> dict[str, str]:
        """Returns ``HEADERS`` of the answer as known by now; empty before all of its requests have a promise."""
        promise = last_end(self._made.values()) if len(self._made) >= self._num_requests else None
        if promise is None:
            return {}
        found = {"farsight-eta-p50": f"{promise.p50_s:.3f}", "farsight-eta-p90": f"{promise.p90_s:.3f}"}
        return found | {"farsight-eta-coarse": "true"} if promise.coarse else found


ANSWER: ContextVar[AnswerPromise | None] = ContextVar("farsight_answer", default=None)
"""Set for the task that serves an answer, and so for the tasks that it starts; None where no client is told."""


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
