"""The ledger of an ingress replica's open requests: a state machine without clock or I/O.

The ledger owns ``(request_id, attempt)``. Whatever dies, an attempt that no worker runs any more is followed by a
higher one that begins where the client's tokens end; tokens of other attempts are dropped. So a stream has no gap, no
repeat and one end (design section 3, rules 8 and 10).
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from farsight.core.forecast import Forecast
from farsight.core.key_sums import KeySums
from farsight.core.messages.requests import (
    Announce,
    AnnounceReply,
    IngressLoad,
    Key,
    OpenRequest,
    Placed,
    Refusal,
    SubmitReply,
)
from farsight.core.messages.tokens import TokenDelta
from farsight.core.request import Request

MAX_ATTEMPTS = 20
"""A request that workers have lost so often may be what kills them, and is given up. A lost Router does not count."""

NO_LOAD = IngressLoad()

ABORT_AGAIN_S = 1.0
"""Seconds after which an attempt that still sends tokens is aborted again: the first message was lost."""


@dataclass(slots=True)
class OpenStream:
    """One open request. The ledger changes it until it ends; a subclass adds the client's side.

    Attributes:
        request: The current attempt.
        output_ids: All tokens that have come, over all attempts.
        num_unnamed: Tokens behind ``output_ids`` that another server made. Only their text is known, so no other
            replica can go on where they end.
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
        attempts: Number of its attempts.
    """

    request_id: str
    attempts: int
    reason: str


class RequestLedger:
    """The open requests of one ingress replica."""

    def __init__(self, ingress_id: str) -> None:
        self.ingress_id = ingress_id
        self._open: dict[str, OpenStream] = {}
        self._sums = KeySums()  # of the open streams that were sent
        self._asked: tuple[int, ...] = ()  # parts of the sums that the next announcement lists
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
        """Returns whether tokens of an open request may come from this replica."""
        return any(stream.replica == replica for stream in self._open.values())

    def replica_of(self, request_id: str) -> str | None:
        """Returns the replica of an open request's current attempt, empty if it is nowhere; None if it is not open."""
        stream = self._open.get(request_id)
        return None if stream is None else stream.replica

    def open(self, stream: OpenStream) -> None:
        """Opens a client's request; the next ``take_outgoing`` returns it."""
        request_id = stream.request.request_id
        self._open[request_id] = stream
        self._outgoing[request_id] = None

    def foresee(self, stream: OpenStream, forecast: Forecast) -> int | None:
        """Gives the forecast to the next attempts; returns the open attempt that was sent without it, if any."""
        stream.request = dataclasses.replace(stream.request, forecast=forecast)
        return stream.request.attempt if stream.sent and stream.request.request_id in self._open else None

    def close(self, request_id: str, now: float) -> None:
        """Closes and aborts a request whose client has left, or was answered by other means; ended ones are closed."""
        if request_id not in self._open:
            return
        stream = self._remove(request_id)
        self._outgoing.pop(request_id, None)
        if stream.sent:
            self._abort(stream.key, now)

    def _remove(self, request_id: str) -> OpenStream:
        self._sums.discard(request_id)
        return self._open.pop(request_id)

    def take_outgoing(self) -> tuple[tuple[Request, ...], tuple[Key, ...]]:
        """Takes what the Router must be told: attempts to run, and attempts to forget."""
        requests = []
        for request_id in self._outgoing:
            stream = self._open[request_id]
            stream.sent = True
            self._sums.put(*stream.key)
            requests.append(stream.request)
        aborts = tuple(self._aborts)
        self._outgoing.clear()
        self._aborts.clear()
        return tuple(requests), aborts

    def submitted(self, reply: SubmitReply) -> list[Refusal]:
        """Books the Router's answer; returns the refusals of open requests, which are closed by them."""
        self._note_placed(reply.placed)
        return self._refused(reply.refusals)

    def _note_placed(self, all_placed: Iterable[Placed]) -> None:
        for placed in all_placed:
            stream = self._current((placed.request_id, placed.attempt))
            if stream is not None and placed.replica:
                stream.replica, stream.worker_incarnation = placed.replica, placed.worker_incarnation

    def submit_failed(self, requests: Iterable[Request]) -> None:
        """Sends these requests again as new attempts: the Router died with them or is absent, so they may be placed."""
        for request in requests:
            stream = self._current((request.request_id, request.attempt))
            if stream is not None and not stream.num_unnamed:  # else it runs: its tokens have come
                self._follow_up(stream)

    def receive(self, replica: str, incarnation: str, deltas: Iterable[TokenDelta], now: float) -> list[TokenDelta]:
        """Books tokens from a worker; returns the deltas for clients. A finish reason closes the request."""
        return [delta for delta in deltas if self._take(replica, incarnation, delta, now)]

    def _take(self, replica: str, incarnation: str, delta: TokenDelta, now: float) -> bool:
        stream = self._current((delta.request_id, delta.attempt))
        if stream is None:
            if delta.finish_reason is None:
                self._abort((delta.request_id, delta.attempt), now)
            return False
        stream.replica, stream.worker_incarnation = replica, incarnation
        if delta.finish_reason == "abort" or delta.start != stream.output_len:
            self._resume([stream.key])  # the abort did not come from here, or tokens were lost on the way
            return False
        stream.output_ids += delta.token_ids
        stream.num_unnamed += delta.num_unnamed
        if delta.finish_reason is not None:
            self._remove(delta.request_id)
        return True

    def worker_lost(self, replica: str) -> None:
        """Resumes the requests of a worker whose connection broke, wherever the Router places them."""
        self._resume([stream.key for stream in self._open.values() if stream.replica == replica])

    def announce(self, load: IngressLoad = NO_LOAD) -> Announce:
        """Sums up the requests that have been sent and are still open, and lists those that the Router asked for.

        Args:
            load: The load of this replica, as its ``FirstCheck`` counts it.
        """
        listed, self._asked = self._asked, ()
        streams = (self._open[request_id] for request_id, _ in self._sums.keys(listed))
        return Announce(self.ingress_id, self._sums.packed(), listed, tuple(map(_announced, streams)), load)

    def announced(self, reply: AnnounceReply) -> list[Refusal]:
        """Books the Router's answer: resumes lost requests; returns refusals as ``submitted`` does."""
        self._asked = reply.asked
        self._note_placed(reply.placed)
        self._resume(reply.lost)
        return self._refused(reply.refusals)

    @property
    def is_asked(self) -> bool:
        """Whether the Router waits for an announcement that lists streams."""
        return bool(self._asked)

    def take_given_up(self) -> list[GivenUp]:
        """Takes the requests that were resumed too often, or cannot be resumed."""
        given_up, self._given_up = self._given_up, []
        return given_up

    def _refused(self, refusals: Iterable[Refusal]) -> list[Refusal]:
        told = {(refusal.request_id, refusal.attempt): refusal for refusal in refusals}  # some more than once
        ended = [refusal for key, refusal in told.items() if self._current(key) is not None]
        for refusal in ended:
            self._remove(refusal.request_id)
        return ended

    def _current(self, key: Key) -> OpenStream | None:
        """Returns the open request of which this attempt is the current one and has been sent."""
        stream = self._open.get(key[0])
        return stream if stream is not None and stream.sent and stream.key == key else None

    def _resume(self, keys: Iterable[Key]) -> None:
        """Sends lost attempts again as higher ones, or gives them up."""
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
        self._remove(request_id)
        self._given_up.append(GivenUp(request_id, attempt + 1, reason))

    def _follow_up(self, stream: OpenStream) -> None:
        """Makes a higher attempt, which goes on where the client's tokens end."""
        request_id, attempt = stream.key
        stream.request = dataclasses.replace(stream.request, attempt=attempt + 1, output_ids=tuple(stream.output_ids))
        stream.sent, stream.replica, stream.worker_incarnation = False, "", ""
        self._sums.discard(request_id)
        self._outgoing[request_id] = None
        self.num_resumed += 1

    def _abort(self, key: Key, now: float) -> None:
        """Aborts an attempt unless that was done within ``ABORT_AGAIN_S``. Amortised O(1)."""
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
