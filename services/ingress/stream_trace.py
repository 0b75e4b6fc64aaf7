"""What the ingress notes of one request for its explanation: what nobody behind it can know."""

from __future__ import annotations

import time

from core.decisions import Decision, Facts, on_clock, pack_decisions
from core.messages.log import FinishedRequest, RequestTrace
from core.request import Request

SOURCE = "ingress"
MAX_NOTES = 32
"""Beyond them they are only counted; the end is always noted."""


class StreamTrace:
    """Notes in order of time; nothing of a request that nobody can ask for.

    Args:
        request: As it came in; its origin stays.
        received_at: When, in seconds since the epoch.
    """

    def __init__(self, request: Request, received_at: float) -> None:
        self._request = request
        self._epoch_s = received_at - time.monotonic()
        self._decisions: list[Decision] = []
        self._num_left_out = 0
        self.note("received", {"prompt_tokens": request.prompt_len, "max_new_tokens": request.sampling.max_new_tokens})

    def note(self, kind: str, facts: Facts) -> None:
        if self._request.origin is None:
            return
        if len(self._decisions) >= MAX_NOTES:
            self._num_left_out += 1
            return
        self._decisions.append(Decision(kind, time.monotonic(), facts))

    def end(self, record: FinishedRequest) -> list[RequestTrace]:
        """All of it with how the request ended, in one trace; none of a request that nobody can ask for."""
        facts: dict[str, float | str] = {
            "reason": record.finish_reason,
            "output_tokens": record.output_len,
            "attempts": record.attempts,
            "jct_s": record.jct_s,
        }
        if record.ttft_s is not None:
            facts["ttft_s"] = record.ttft_s
        end = Decision("answered", time.monotonic(), facts)
        return self._trace([*self._decisions, end], ended=True)

    def is_of(self, response_id: str) -> bool:
        origin = self._request.origin
        return origin is not None and origin.response_id == response_id

    def so_far(self) -> list[RequestTrace]:
        return self._trace(self._decisions, ended=False)

    def _trace(self, decisions: list[Decision], *, ended: bool) -> list[RequestTrace]:
        request_id, origin = self._request.request_id, self._request.origin
        if origin is None:
            return []
        trace = RequestTrace(
            trace_id=f"{origin.response_id}/{request_id}/{SOURCE}",
            request_id=request_id,
            choice=origin.choice,
            owner=origin.owner,
            source=SOURCE,
            attempt=0,
            ended=ended,
            num_left_out=self._num_left_out,
            decisions=on_clock(self._epoch_s, pack_decisions(decisions)),
        )
        return [trace]
