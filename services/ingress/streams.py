"""One open request at its ingress replica: its tokens on the way in, the deltas that wait for its client, and its
record for the log and for an explanation."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace

from farsight.core.decisions import Decision, Facts, on_clock, pack_decisions
from farsight.core.images import identity_ids
from farsight.core.messages.log import FinishedRequest, RequestTrace
from farsight.core.messages.requests import Promise
from farsight.core.messages.tokens import TokenBatches, TokenDelta, joined
from farsight.core.request import Request
from farsight.kvcache.block_manager import hash_blocks, salted_root
from farsight.services.api.answers.served import ANSWER, AnswerPromise
from farsight.services.ingress.first_check import CountedRequest
from farsight.services.ingress.ledger import OpenStream

SOURCE = "ingress"
MAX_NOTES = 32
"""Further notes of one request are only counted; its end is always noted."""


class TokenInbox:
    """Takes replies in any order and any number of times; the mirror of the worker's ``TokenOutbox``.

    Each connection to a worker has an inbox. It belongs to the worker life that answers first, and begins with the
    first batch that this life still has.
    """

    def __init__(self) -> None:
        self.incarnation = ""
        self._ack_seq: int | None = None

    @property
    def ack_seq(self) -> int:
        """Number of the last batch received; a reply holds all batches after the acknowledged one, so none is lost."""
        return self._ack_seq or 0

    def receive(self, reply: TokenBatches) -> list[TokenDelta]:
        """Returns the deltas of this reply that are new."""
        self.incarnation = self.incarnation or reply.worker_incarnation
        if reply.worker_incarnation != self.incarnation:
            return []
        deltas: list[TokenDelta] = []
        for batch in reply.batches:
            if self._ack_seq is None or batch.seq > self._ack_seq:
                self._ack_seq = batch.seq
                deltas += batch.deltas
        return deltas


class Mailbox:
    """Deltas of one stream. Deltas that wait together are read as one, since each event sent to a client costs time."""

    def __init__(self) -> None:
        self._deltas: list[TokenDelta] = []
        self._failure: Exception | None = None
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._deltas)

    def put(self, delta: TokenDelta) -> None:
        self._deltas.append(delta)
        self._filled.set()

    def fail(self, error: Exception) -> None:
        """Ends the stream with an error behind the deltas that wait."""
        self._failure = error
        self._filled.set()

    async def take(self) -> TokenDelta:
        """Waits for deltas and joins all that have come; a delta with an error is returned by itself.

        Raises:
            Exception: The error that ``fail`` was called with.
        """
        await self._filled.wait()
        deltas, self._deltas = self._deltas, []
        if not deltas:
            assert self._failure is not None
            raise self._failure
        if len(deltas) > 1 and deltas[-1].error is not None:
            self._deltas.append(deltas.pop())
        if not self._deltas and self._failure is None:
            self._filled.clear()
        return deltas[0] if len(deltas) == 1 else joined(deltas)


class StreamTrace:
    """Notes of a request in order of time; none of a request without an origin, which no client can ask for.

    Args:
        request: The first attempt; its origin stays.
        received_at: Seconds since the epoch.
    """

    def __init__(self, request: Request, received_at: float) -> None:
        self._request = request
        self._epoch_s = received_at - time.monotonic()
        self._decisions: list[Decision] = []
        self._num_left_out = 0
        facts = {"prompt_tokens": request.prompt_len, "max_new_tokens": request.sampling.max_new_tokens}
        self.note("received", facts | ({"tenant": request.tenant} if request.tenant else {}))

    def note(self, kind: str, facts: Facts) -> None:
        if self._request.origin is None:
            return
        if len(self._decisions) >= MAX_NOTES:
            self._num_left_out += 1
            return
        self._decisions.append(Decision(kind, time.monotonic(), facts))

    def end(self, record: FinishedRequest) -> list[RequestTrace]:
        """Returns one trace of all notes and the request's end; none of a request that no client can ask for."""
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

    @property
    def exemplar(self) -> dict[str, str]:
        """Labels by which the request of a latency is found: the answer's id, and its trace's id if it has a span;
        empty if no client can ask for it."""
        origin = self._request.origin
        if origin is None:
            return {}
        named = {"response_id": origin.response_id}
        return named | ({"trace_id": origin.traceparent.split("-")[1]} if origin.traceparent else {})

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


@dataclass(slots=True)
class ClientStream(OpenStream):
    """An open request with its client's side.

    Attributes:
        answered_by, attempts: Replica whose tokens came last, and the number of attempts by then.
        trouble: Error of the last external server that gave it back.
        predicted: Set once its forecast has come.
        answer: Gets the promises of its end; None where no client is told.
        admitted: As ``FirstCheck.admit`` returned it.
    """

    admitted: CountedRequest = field(kw_only=True)
    deltas: Mailbox = field(default_factory=Mailbox)
    received_at: float = field(default_factory=time.time)
    began: float = field(default_factory=time.monotonic)
    token_at: float | None = None
    ttft_s: float | None = None
    num_tokens: int = 0
    attempts: int = 1
    answered_by: str = ""
    reason: str = "abort"
    trouble: str = ""
    deadline: asyncio.TimerHandle | None = None
    predicted: asyncio.Event = field(default_factory=asyncio.Event)
    answer: AnswerPromise | None = field(default_factory=ANSWER.get)
    trace: StreamTrace = field(init=False)

    def __post_init__(self) -> None:
        self.trace = StreamTrace(self.request, self.received_at)

    def note_end(self, promise: Promise) -> None:
        """Passes a replica's promise on to the client, counted from the receipt of the request."""
        if self.answer is not None:
            passed_s = time.monotonic() - self.began
            self.answer.add(replace(promise, p50_s=promise.p50_s + passed_s, p90_s=promise.p90_s + passed_s))

    def record(self, now: float) -> FinishedRequest:
        """Makes the request's record for the log."""
        return FinishedRequest(
            request_id=self.request.request_id,
            replica=self.answered_by,
            attempts=self.attempts,
            prompt_len=self.request.prompt_len,
            output_len=self.num_tokens,
            max_new_tokens=self.request.sampling.max_new_tokens,
            finish_reason=self.reason,
            received_at=self.received_at,
            ttft_s=self.ttft_s,
            jct_s=now - self.began,
            priority=self.request.priority,
            tenant=self.request.tenant,
        )


def fail_stream(stream: ClientStream, attempts: int, reason: str) -> None:
    """Ends a stream with an error, behind the deltas that have come."""
    if stream.trouble:
        reason = f"{reason}; {stream.trouble}"
    stream.reason = "error"
    stream.deltas.put(TokenDelta(stream.request.request_id, attempts, 0, (), "", "error", reason))


def prefix_hashes(request: Request, block_size: int) -> tuple[int, ...]:
    """Hashes the prompt's full blocks; an image counts by its content. Empty where the request can share none.

    Args:
        block_size: 0 where the placement compares no prompts.
    """
    if not block_size or request.sampling.computes_prompt:
        return ()
    named = identity_ids(request.prompt_ids, request.images)
    return tuple(hash_blocks(named, block_size, salted_root(request.cache_salt)))
