"""What the client of an answer is told of its end, for the code that writes headers and the backend that knows it."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar

from core.messages.requests import Promise, last_end

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
        """The first promise of a request holds; those of later attempts change no header."""
        self._made.setdefault(promise.request_id, promise)

    def headers(self) -> dict[str, str]:
        """``HEADERS`` of the answer as known by now; empty before all of its requests have a promise."""
        promise = last_end(self._made.values()) if len(self._made) >= self._num_requests else None
        if promise is None:
            return {}
        found = {"farsight-eta-p50": f"{promise.p50_s:.3f}", "farsight-eta-p90": f"{promise.p90_s:.3f}"}
        return found | {"farsight-eta-coarse": "true"} if promise.coarse else found


ANSWER: ContextVar[AnswerPromise | None] = ContextVar("farsight_answer", default=None)
"""Set for the task that serves an answer, and so for the tasks that it starts; None where no client is told."""
