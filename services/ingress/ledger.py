"""What an ingress replica knows of its open requests: a state machine without clock or I/O.

It owns ``(request_id, attempt)``. Whatever dies, an attempt that nobody runs any more is followed by a higher one that
begins where the client's tokens end; tokens of other attempts are dropped. So a stream has no gap, no repeat and one
end (design section 3, rules 8 and 10).
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from core.forecast import Forecast
from core.messages.requests import Announce, AnnounceReply, IngressLoad, Key, OpenRequest, Placed, Refusal, SubmitReply
from core.messages.tokens import TokenDelta
from core.request import Request

MAX_ATTEMPTS = 20
"""A request that workers have lost so often may be what kills them: it is given up. A Router's absence costs none."""

NO_LOAD = IngressLoad()

ABORT_AGAIN_S = 1.0
"""An attempt that still sends tokens so long after its abort is aborted again: the message was lost."""


@dataclass(slots=True)
class OpenStream:
    """One open request. The ledger changes it until it ends; the replica that made it adds its client's side.

    Attributes:
        request: The current attempt.
        output_ids: All tokens that have come, over all attempts.
        num_unnamed: Tokens behind them that another server made. Only their text is known, so no other replica can go
            on where they end.
        sent: Whether a Router was sent the current attempt.
        replica: Where the current attempt is; empty if that is not known.
        num_lost: Attempts that were lost after a Router had taken them.
    """

    request: Request
    output_ids: list[int] = field(default_factory=list)
    num_unnamed: int = 0
    num_lost: int = 0
    sent: bool = False
    replica: str = ""
    worker_incarnation: str = ""

    @property
    def key(self) -> Key:
        return self.request.request_id, self.request.attempt

    @property
    def output_len(self) -> int:
        return len(self.output_ids) + self.num_unnamed


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A request that is closed without an end; its client has yet to be told.

    Attributes:
        attempts: How many there were.
    """

    request_id: str
    attempts: int
    reason: str


class RequestLedger:
    """The open requests of one ingress replica."""

    def __init__(self, ingress_id: str) -> None:
        self.ingress_id = ingress_id
        self._open: dict[str, OpenStream] = {}
        self._outgoing: dict[str, None] = {}  # ids whose current attempt has not been sent
        self._aborts: dict[Key, None] = {}
        self._aborted_at: OrderedDict[Key, float] = OrderedDict()  # within ``ABORT_AGAIN_S``, the oldest first
        self._given_up: list[GivenUp] = []
        self.num_resumed = 0

    def __len__(self) -> int:
        return len(self._open)

    @property
    def has_outgoing(self) -> bool:
        return bool(self._outgoing or self._aborts)

    def runs_on(self, replica: str) -> bool:
        """Whether tokens of an open request may come from there."""
        return any(stream.replica == replica for stream in self._open.values())

    def replica_of(self, request_id: str) -> str | None:
        """Where the current attempt of an open request is, empty if it is nowhere; None if it is not open."""
        stream = self._open.get(request_id)
        return None if stream is None else stream.replica

    def open(self, stream: OpenStream) -> None:
        """A client wants this; it goes out with the next ``take_outgoing``."""
        request_id = stream.request.request_id
        self._open[request_id] = stream
        self._outgoing[request_id] = None

    def foresee(self, stream: OpenStream, forecast: Forecast) -> int | None:
        """Its next attempts carry the forecast; returns the attempt that is on its way without, if one is."""
        stream.request = dataclasses.replace(stream.request, forecast=forecast)
        return stream.request.attempt if stream.sent and stream.request.request_id in self._open else None

    def close(self, request_id: str, now: float) -> None:
        """The client has left, or was answered by other means; a request that has ended is closed already."""
        stream = self._open.pop(request_id, None)
        if stream is None:
            return
        self._outgoing.pop(request_id, None)
        if stream.sent:
            self._abort(stream.key, now)

    def take_outgoing(self) -> tuple[tuple[Request, ...], tuple[Key, ...]]:
        """What the Router must be told: attempts to run, attempts to forget."""
        requests = []
        for request_id in self._outgoing:
            stream = self._open[request_id]
            stream.sent = True
            requests.append(stream.request)
        aborts = tuple(self._aborts)
        self._outgoing.clear()
        self._aborts.clear()
        return tuple(requests), aborts

    def submitted(self, reply: SubmitReply) -> list[Refusal]:
        """The Router has answered; returns the refusals of requests that are still open, which they end."""
        self._note_placed(reply.placed)
        return self._refused(reply.refusals)

    def _note_placed(self, all_placed: Iterable[Placed]) -> None:
        for placed in all_placed:
            stream = self._current((placed.request_id, placed.attempt))
            if stream is not None and placed.replica:
                stream.replica, stream.worker_incarnation = placed.replica, placed.worker_incarnation

    def submit_failed(self, requests: Iterable[Request]) -> None:
        """The Router died with these in its hands, or is not there; nobody knows whether they were placed."""
        for request in requests:
            stream = self._current((request.request_id, request.attempt))
            if stream is not None and not stream.num_unnamed:  # whose tokens have come is placed, and runs
                self._follow_up(stream)

    def receive(self, replica: str, incarnation: str, deltas: Iterable[TokenDelta], now: float) -> list[TokenDelta]:
        """Tokens from a worker; returns those for clients. The one with a finish reason closes its request."""
        return [delta for delta in deltas if self._take(replica, incarnation, delta, now)]

    def _take(self, replica: str, incarnation: str, delta: TokenDelta, now: float) -> bool:
        stream = self._current((delta.request_id, delta.attempt))
        if stream is None:
            if delta.finish_reason is None:
                self._abort((delta.request_id, delta.attempt), now)
            return False
        stream.replica, stream.worker_incarnation = replica, incarnation
        if delta.finish_reason == "abort" or delta.start != stream.output_len:
            self._resume([stream.key])  # nobody here has aborted it, or tokens were lost on the way
            return False
        stream.output_ids += delta.token_ids
        stream.num_unnamed += delta.num_unnamed
        if delta.finish_reason is not None:
            del self._open[delta.request_id]
        return True

    def worker_lost(self, replica: str) -> None:
        """Its connection broke: what ran there is resumed wherever the Router places it."""
        self._resume([stream.key for stream in self._open.values() if stream.replica == replica])

    def announce(self, load: IngressLoad = NO_LOAD) -> Announce:
        """All that has been sent and is still open.

        Args:
            load: What this replica has in flight, as its ``FirstCheck`` counts it.
        """
        streams = [stream for stream in self._open.values() if stream.sent]
        return Announce(self.ingress_id, tuple(map(_announced, streams)), load)

    def announced(self, reply: AnnounceReply) -> list[Refusal]:
        """The Router's answer: what is lost is resumed; returns refusals as ``submitted`` does."""
        self._note_placed(reply.placed)
        self._resume(reply.lost)
        return self._refused(reply.refusals)

    def take_given_up(self) -> list[GivenUp]:
        """Requests that were resumed too often, or cannot be resumed."""
        given_up, self._given_up = self._given_up, []
        return given_up

    def _refused(self, refusals: Iterable[Refusal]) -> list[Refusal]:
        told = {(refusal.request_id, refusal.attempt): refusal for refusal in refusals}  # some more than once
        ended = [refusal for key, refusal in told.items() if self._current(key) is not None]
        for refusal in ended:
            del self._open[refusal.request_id]
        return ended

    def _current(self, key: Key) -> OpenStream | None:
        """The open request whose attempt this is, once it has been sent."""
        stream = self._open.get(key[0])
        return stream if stream is not None and stream.sent and stream.key == key else None

    def _resume(self, keys: Iterable[Key]) -> None:
        """These were lost; they go out again, or are given up."""
        for key in keys:
            stream = self._current(key)
            if stream is None:
                continue
            stream.num_lost += 1
            if stream.num_unnamed:
                self._give_up(stream, f"{stream.replica}, another server, was lost {stream.output_len} tokens into it")
            elif stream.num_lost == MAX_ATTEMPTS:
                self._give_up(stream, f"{stream.request.attempt + 1} workers died with it or lost it")
            else:
                self._follow_up(stream)

    def _give_up(self, stream: OpenStream, reason: str) -> None:
        request_id, attempt = stream.key
        del self._open[request_id]
        self._given_up.append(GivenUp(request_id, attempt + 1, reason))

    def _follow_up(self, stream: OpenStream) -> None:
        """A higher attempt goes on where the client's tokens end."""
        request_id, attempt = stream.key
        stream.request = dataclasses.replace(stream.request, attempt=attempt + 1, output_ids=tuple(stream.output_ids))
        stream.sent, stream.replica, stream.worker_incarnation = False, "", ""
        self._outgoing[request_id] = None
        self.num_resumed += 1

    def _abort(self, key: Key, now: float) -> None:
        """Amortised O(1): what was aborted long ago is forgotten from the oldest on."""
        aborted_at = self._aborted_at
        while aborted_at:
            oldest = next(iter(aborted_at))
            if now - aborted_at[oldest] < ABORT_AGAIN_S:
                break
            del aborted_at[oldest]
        if key not in aborted_at:
            self._aborts[key] = None
            aborted_at[key] = now


def _announced(stream: OpenStream) -> OpenRequest:
    request = stream.request
    work_tokens = request.max_total_len - len(request.output_ids)
    return OpenRequest(request.request_id, request.attempt, stream.replica, stream.worker_incarnation, work_tokens)
