"""The scheduler of a replica that is an external server: a state machine, ``handle(event, now) -> [Instruction]``.

It takes the place of ``ReplicaScheduler``, but plans no steps: one of the same orders decides which request is sent
next, and a circuit breaker decides whether any is sent. A request goes to another replica only before its first token;
every request gets exactly one of an end, a failure and a return.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, repeat

from farsight.core.decisions import Facts
from farsight.core.errors import IntegrityError
from farsight.core.forecast import Forecast, ForecastMade
from farsight.core.key_sums import KeySums
from farsight.core.messages.plans import FinishedSequence, StartedRequest
from farsight.core.messages.requests import Key
from farsight.core.request import Request, SequenceStatus
from farsight.policies.external.circuit_breaker import (
    BreakerEvent,
    CircuitBreaker,
    Failed,
    ProbeBegun,
    ProbeFailed,
    ProbePassed,
    Succeeded,
)
from farsight.policies.external.events import (
    AskServer,
    BackendEvent,
    BackendInstruction,
    BreakerChanged,
    CancelRequest,
    FailRequest,
    OutputEnded,
    OutputFailed,
    OutputGrew,
    ProbeDone,
    ProbeTick,
    ReturnRequest,
    SendRequest,
    ServerFailure,
)
from farsight.policies.interfaces import Job, Order
from farsight.policies.replica.decision_trace import Account, Accounts, account_closed, forecast_facts
from farsight.policies.replica.events import (
    ForecastsArrived,
    RefuseRequest,
    RequestEnded,
    RequestsAborted,
    RequestsArrived,
    RequestStarted,
)
from farsight.policies.tenancy.fair_shares import FairShares

NUM_REMEMBERED = 4096
"""Ended attempts that are remembered: their ingress replicas may not know yet that they ended."""


@dataclass(slots=True)
class _Held:
    """A request of this replica, waiting or sent."""

    request: Request
    job: Job
    sent_at: float | None = None

    @property
    def key(self) -> Key:
        return self.request.request_id, self.request.attempt

    @property
    def sent(self) -> bool:
        return self.sent_at is not None

    @property
    def started(self) -> bool:
        """Whether the client has tokens of this attempt."""
        return self.job.output_len > len(self.request.output_ids)


class BackendScheduler:
    """Schedules the requests of one external server.

    Args:
        order: Ranks the waiting requests, within the turns of their tenants. It never sees a running job.
        max_num_seqs: Most requests that are sent and not ended.
        breaker: Decides whether any request is sent.
    """

    def __init__(self, order: Order, max_num_seqs: int, breaker: CircuitBreaker | None = None) -> None:
        self.breaker = breaker or CircuitBreaker()
        self.max_model_len = 0
        self._order = order
        self._shares = FairShares(max_num_seqs)
        self._max_num_seqs = max_num_seqs
        self._held: dict[str, _Held] = {}
        self._sums = KeySums()  # of these
        self._num_sent = 0
        self._recent: dict[Key, None] = {}
        self._accounts = Accounts()
        self._probing = False

    @property
    def num_sent(self) -> int:
        """Requests that were sent and have not ended."""
        return self._num_sent

    @property
    def num_waiting(self) -> int:
        return len(self._held) - self._num_sent

    @property
    def ingress_ids(self) -> set[str]:
        """The ingress replicas of the requests here."""
        return {held.request.ingress_id for held in self._held.values()}

    def keys_of(self, ingress_id: str) -> tuple[Key, ...]:
        """Returns the attempts of an ingress replica that wait or are sent."""
        return tuple(held.key for held in self._held.values() if held.request.ingress_id == ingress_id)

    def unknown(self, keys: Iterable[Key]) -> tuple[Key, ...]:
        """Returns the attempts among these that neither wait nor are sent nor have ended lately."""
        return tuple(key for key in keys if key not in self._recent and not self._knows(key))

    def sums(self) -> bytes:
        """Returns the sums of the attempts that wait or are sent, as ``KeySums`` packs them."""
        return self._sums.packed()

    def accounts(self, response_id: str) -> list[Account]:
        """Returns the decision traces of the requests of an answer."""
        return list(self._accounts.of(response_id))

    def handle(self, event: BackendEvent, now: float) -> list[BackendInstruction]:
        """Applies an event; no other method changes the state. ``now``: seconds on the caller's monotonic clock."""
        out: list[BackendInstruction] = []
        match event:
            case RequestsArrived():
                out += self._arrive(event, now)
            case RequestsAborted(keys):
                out += self._abort(keys, now)
            case ForecastsArrived(made):
                self._take_forecasts(made, now)
            case ProbeDone():
                out += self._take_probe(event, now)
            case OutputGrew(key, num_tokens):
                held = self._current(key)
                if held is not None:
                    held.job.output_len += num_tokens
            case OutputEnded():
                out += self._end(event, now)
            case OutputFailed(key, failure):
                out += self._fail(key, failure, now)
            case ProbeTick():
                out += self._ask(now)
        out += self._send(now)
        out += [account_closed(account) for account in self._accounts.pop_closed()]
        return out

    def _arrive(self, event: RequestsArrived, now: float) -> list[BackendInstruction]:
        out: list[BackendInstruction] = []
        for request, placement in zip(event.requests, chain(event.placements, repeat(b"")), strict=False):
            key = request.request_id, request.attempt
            if self._knows(key) or key in self._recent:
                continue  # a duplicate, or older than the attempt that is held
            out += self._leave([request.request_id], "superseded", now)
            self._accounts.open(request, placement)
            if self.max_model_len and request.max_total_len > self.max_model_len:
                out.append(self._refuse(request, now))
            elif not self.breaker.closed:
                self._accounts.note(request.request_id, "returned", now, {"reason": self.breaker.reason})
                self._accounts.close(request.request_id)
                out += self._returned(request, self.breaker.reason, now, now)
            else:
                self._hold(request, now)
        return out

    def _refuse(self, request: Request, now: float) -> RefuseRequest:
        message = (
            f"prompt and max_tokens together are {request.max_total_len} tokens; the limit of the server is "
            f"{self.max_model_len}"
        )
        self._accounts.note(request.request_id, "refused", now, {"reason": message})
        self._accounts.close(request.request_id)
        return RefuseRequest(request.request_id, request.attempt, "max_tokens", message)

    def _hold(self, request: Request, now: float) -> None:
        job = Job.of(request, now)
        self._held[request.request_id] = _Held(request, job)
        self._sums.put(request.request_id, request.attempt)
        self._order.add(job, now)
        self._shares.add(job)
        self._accounts.note(request.request_id, "arrived", now, self._queue())
        if request.forecast is not None:
            self._note_forecast(request, request.forecast, now)
        if self._num_sent >= self._max_num_seqs:
            facts = {"reason": "places", "max_num_seqs": self._max_num_seqs, **self._queue()}
            self._accounts.note(request.request_id, "waits", now, facts)

    def _note_forecast(self, request: Request, forecast: Forecast, now: float) -> None:
        facts = forecast_facts(forecast.within(request.sampling.max_new_tokens))
        self._accounts.note(request.request_id, "forecast", now, facts)

    def _send(self, now: float) -> list[BackendInstruction]:
        """Sends waiting requests while there are free slots; none unless the breaker is closed."""
        out: list[BackendInstruction] = []
        if not self.breaker.closed:
            return out
        self._order.refresh(now)
        while self._num_sent < min(self._max_num_seqs, len(self._held)):
            job = next(self._shares.ranked(self._order, now, self._waits, self._sent()))
            self._order.remove(job)
            held = self._held[job.request_id]
            held.sent_at = now
            self._num_sent += 1
            facts = {"waited_s": now - job.arrived_at, **self._queue()}
            self._accounts.note(job.request_id, "sent", now, facts)
            out.append(SendRequest(held.request))
        return out

    def _waits(self, job: Job) -> bool:
        return not self._held[job.request_id].sent

    def _sent(self) -> Iterator[Job]:
        return (held.job for held in self._held.values() if held.sent)

    def _abort(self, keys: Iterable[Key], now: float) -> list[BackendInstruction]:
        ids = [request_id for request_id, attempt in keys if self._holds_up_to(request_id, attempt)]
        return self._leave(ids, "aborted", now)

    def _leave(self, request_ids: Iterable[str], why: str, now: float) -> list[BackendInstruction]:
        """Forgets requests that have not ended; cancels those that were sent."""
        out: list[BackendInstruction] = []
        for request_id in request_ids:
            held = self._held.get(request_id)
            if held is None:
                continue
            if held.sent:
                out.append(CancelRequest(held.key))
            self._note_end(held, why, now, {})
            self._let_go(held, now)
        return out

    def _take_forecasts(self, made: Iterable[ForecastMade], now: float) -> None:
        for each in made:
            held = self._current((each.request_id, each.attempt))
            if held is None:
                continue
            held.request = replace(held.request, forecast=each.forecast)
            held.job.forecast = each.forecast
            self._note_forecast(held.request, each.forecast, now)
            if not held.sent:
                self._order.foreseen(held.job)

    def _end(self, event: OutputEnded, now: float) -> list[BackendInstruction]:
        held = self._current(event.key)
        if held is None:
            return []
        out = self._judge(Succeeded(), now)
        self._note_end(held, "server_ended", now, {"reason": event.status.finish_reason or ""})
        self._let_go(held, now)
        self._order.learn(held.job, censored=event.status is not SequenceStatus.FINISHED_STOPPED)
        if event.cached_len is not None and held.sent_at is not None:
            queue_s = held.sent_at - held.job.arrived_at
            out.append(RequestStarted(StartedRequest(*held.key, event.cached_len, queue_s)))
        return [*out, self._ended(held, event.status, now, event.cached_len or 0)]

    def _fail(self, key: Key, failure: ServerFailure, now: float) -> list[BackendInstruction]:
        """Records the failure for the server even if the attempt is gone already."""
        out = [] if failure.of_request else self._judge(Failed(failure.message, failure.trips), now)
        held = self._current(key)
        if held is None:
            return out
        if not held.started and not failure.of_request:
            return out + self._give_back(held, failure.message, now)
        self._note_end(held, "server_failed", now, {"reason": failure.message})
        self._let_go(held, now)
        ended = self._ended(held, SequenceStatus.FINISHED_FAILED, now)
        return [*out, FailRequest(held.request, held.job.output_len, failure.message), ended]

    def _give_back(self, held: _Held, reason: str, now: float) -> list[BackendInstruction]:
        self._note_end(held, "returned", now, {"reason": reason})
        self._let_go(held, now)
        return self._returned(held.request, reason, held.job.arrived_at, now)

    def _returned(self, request: Request, reason: str, arrived_at: float, now: float) -> list[BackendInstruction]:
        self._remember((request.request_id, request.attempt))
        status, output_len = SequenceStatus.FINISHED_ABORTED, len(request.output_ids)
        finished = FinishedSequence(request.request_id, request.attempt, status, output_len)
        return [ReturnRequest(request, reason), RequestEnded(finished, arrived_at, now)]

    def _judge(self, event: BreakerEvent, now: float) -> list[BackendInstruction]:
        """Passes the event to the breaker; if the breaker opens, gives back every waiting request."""
        if not self.breaker.handle(event, now):
            return []
        out: list[BackendInstruction] = [BreakerChanged()]
        if not self.breaker.closed:
            for held in [held for held in self._held.values() if not held.sent]:
                out += self._give_back(held, self.breaker.reason, now)
        return out

    def _take_probe(self, event: ProbeDone, now: float) -> list[BackendInstruction]:
        self._probing = False
        if event.failure is not None:
            return self._judge(ProbeFailed(event.failure.message, event.failure.trips), now)
        told = event.max_model_len != self.max_model_len and self.breaker.closed
        self.max_model_len = event.max_model_len
        return self._judge(ProbePassed(), now) or ([BreakerChanged()] if told else [])

    def _ask(self, now: float) -> list[BackendInstruction]:
        if self._probing or now < self.breaker.probe_at:
            return []
        if self.breaker.closed and self._num_sent:
            return []  # its requests show the server's state, and some servers break off a stream when probed
        self._probing = True
        return [*self._judge(ProbeBegun(), now), AskServer(generates=not self.breaker.closed)]

    def _knows(self, key: Key) -> bool:
        held = self._held.get(key[0])
        return held is not None and held.request.attempt >= key[1]

    def _holds_up_to(self, request_id: str, attempt: int) -> bool:
        held = self._held.get(request_id)
        return held is not None and held.request.attempt <= attempt

    def _current(self, key: Key) -> _Held | None:
        held = self._held.get(key[0])
        return held if held is not None and held.key == key else None

    def _let_go(self, held: _Held, now: float) -> None:
        """Forgets a request and charges its tenant for its time in a place: its work on the server is unknown."""
        del self._held[held.request.request_id]
        self._sums.discard(held.request.request_id)
        self._num_sent -= held.sent
        if held.sent_at is None:
            self._order.remove(held.job)
        else:
            self._shares.charge(held.job.tenant, (now - held.sent_at) / self._max_num_seqs)
        self._shares.remove(held.job)
        self._remember(held.key)

    def _remember(self, key: Key) -> None:
        self._recent[key] = None
        if len(self._recent) > NUM_REMEMBERED:
            del self._recent[next(iter(self._recent))]

    def _ended(self, held: _Held, status: SequenceStatus, now: float, cached_len: int = 0) -> RequestEnded:
        finished = FinishedSequence(*held.key, status, held.job.output_len, cached_len)
        return RequestEnded(finished, held.job.arrived_at, now)

    def _note_end(self, held: _Held, kind: str, now: float, facts: Facts) -> None:
        request_id = held.request.request_id
        self._accounts.note(request_id, kind, now, {"output_tokens": held.job.output_len, **facts})
        self._accounts.close(request_id)

    def _queue(self) -> dict[str, float | str]:
        return {"num_admitted": self._num_sent, "num_waiting": self.num_waiting}

    def check_integrity(self) -> None:
        """Raises IntegrityError unless counts, places, the breaker and the journal agree."""
        self.breaker.check_integrity()
        num_sent = sum(held.sent for held in self._held.values())
        if num_sent != self._num_sent or num_sent > self._max_num_seqs:
            raise IntegrityError(
                f"{num_sent} requests are sent, {self._num_sent} are counted, at most {self._max_num_seqs} may be"
            )
        if self.num_waiting and not self.breaker.closed:
            raise IntegrityError(f"{self.num_waiting} requests wait while the breaker is {self.breaker.state}")
        waiting = {job.request_id for job in self._order.ranked(0.0)}
        if waiting != {request_id for request_id, held in self._held.items() if not held.sent}:
            raise IntegrityError("the order and the requests that wait disagree")
        if self._recent.keys() & {held.key for held in self._held.values()}:
            raise IntegrityError("a held request counts as ended")
        self._shares.check_integrity()
        self._accounts.check_integrity(set(self._held))
