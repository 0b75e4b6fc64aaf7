"""The memory of a replica's scheduler of its decisions about each request, so that they can be explained.

The scheduler hands every fact and nothing else to its one observer, ``DecisionTrace``, which notes the fact with the
numbers of the parts in the account of the request. The kinds of decisions and the names of numbers are a contract.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from farsight.core.decisions import DecisionPacker, Facts
from farsight.core.errors import IntegrityError
from farsight.core.forecast import QUANTILES, Forecast
from farsight.core.messages.requests import Promise
from farsight.core.request import Request
from farsight.policies.interfaces import Job, ReplicaPolicies, ScheduledRequest
from farsight.policies.replica.events import AccountClosed, Instruction
from farsight.policies.replica.facts import (
    Admitted,
    Adopted,
    Arrived,
    EndReached,
    Evicted,
    Fact,
    HostFull,
    Left,
    NotAdmitted,
    Predicted,
    StartedAlone,
    TurnedAway,
    TurnsChanged,
)
from farsight.policies.replica.places import PlaceLimit
from farsight.policies.tenancy.fair_shares import FairShares

MAX_DECISIONS = 64
"""Most decisions noted of one request: the first half of this number and the latest; the rest is only counted."""

MAX_IN_ALL = 100_000
"""Most decisions noted of all requests together; further ones are only counted."""

_Known = dict[str, float | str]


@dataclass(slots=True)
class Account:
    """All decisions about one attempt on one replica.

    Attributes:
        placement: The Router's reasons for the replica; ``core.decisions``, packed.
        decisions: On the scheduler's clock, each packed at once: small long-lived objects are dear to garbage-collect.
        num_left_out: Decisions that there was no room for.
    """

    request: Request
    placement: bytes
    decisions: list[bytes] = field(default_factory=list)
    num_left_out: int = 0


class Accounts:
    """One account of each request that is here and whose ``origin`` is known: no client can ask for others.

    ``note`` is O(1) up to a constant, ``MAX_DECISIONS``.
    """

    def __init__(self, max_decisions: int = MAX_DECISIONS, max_in_all: int = MAX_IN_ALL) -> None:
        self._max_decisions = max_decisions
        self._max_in_all = max_in_all
        self._open: dict[str, Account] = {}
        self._closed: list[Account] = []
        self._num_noted = 0
        self._packer = DecisionPacker()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def open(self, request: Request, placement: bytes = b"") -> bool:
        """Opens an account of the request; returns False if there is one already or no ``origin`` is known."""
        if request.origin is None or request.request_id in self._open:
            return False
        self._open[request.request_id] = Account(request, placement)
        return True

    def note(self, request_id: str, kind: str, now: float, facts: Facts) -> None:
        """Notes a decision about a request; ignores requests without an account."""
        account = self._open.get(request_id)
        if account is None:
            return
        if self._num_noted >= self._max_in_all:
            account.num_left_out += 1
            return
        if len(account.decisions) >= self._max_decisions:
            del account.decisions[self._max_decisions // 2]
            account.num_left_out += 1
        else:
            self._num_noted += 1
        account.decisions.append(self._packer.pack(kind, now, facts))

    def close(self, request_id: str) -> None:
        """Closes the account of a request that has left, if there is one."""
        account = self._open.pop(request_id, None)
        if account is not None:
            self._num_noted -= len(account.decisions)
            self._closed.append(account)

    @property
    def has_closed(self) -> bool:
        return bool(self._closed)

    def pop_closed(self) -> list[Account]:
        """Returns the accounts closed since the last call."""
        closed, self._closed = self._closed, []
        return closed

    def reclaim(self, request_id: str) -> Account | None:
        """Takes the account that was closed last, if it is this request's: it goes on elsewhere."""
        if self._closed and self._closed[-1].request.request_id == request_id:
            return self._closed.pop()
        return None

    def of(self, response_id: str) -> Iterator[Account]:
        """Yields the open accounts of one answer. O(requests)."""
        for account in self._open.values():
            if account.request.origin is not None and account.request.origin.response_id == response_id:
                yield account

    def check_integrity(self, known: set[str]) -> None:
        """Raises IntegrityError unless every account is of a known request, and the bounds hold."""
        if not self._open.keys() <= known:
            raise IntegrityError(f"accounts of requests that are not here: {self._open.keys() - known}")
        num_noted = sum(len(account.decisions) for account in self._open.values())
        if num_noted != self._num_noted or num_noted > self._max_in_all:
            raise IntegrityError(f"{num_noted} decisions are noted, {self._num_noted} are counted")


class DecisionTrace:
    """Observes what a replica's scheduler books and decides, and asks the parts for their numbers then, and only then.

    For a request without an account, no part is asked.

    Args:
        places: Says how many requests execute at once.
        requests: All requests of the scheduler, by id; ``admitted`` are those with a place.
        shares: Asked for the counters of tenants.
    """

    def __init__(
        self,
        policies: ReplicaPolicies,
        places: PlaceLimit,
        requests: Mapping[str, ScheduledRequest],
        admitted: Mapping[str, ScheduledRequest],
        shares: FairShares,
    ) -> None:
        self.accounts = Accounts()
        self._order, self._admission, self._kv = policies.order, policies.admission, policies.kv
        self._places = places
        self._requests, self._admitted = requests, admitted
        self._shares = shares
        self._fresh: list[ScheduledRequest] = []
        self._order.on_move = self._moved
        self._observers: dict[type[Fact], Callable[[Any, float], None]] = {
            Arrived: self._arrived,
            TurnedAway: self._turned_away,
            Adopted: self._adopted,
            Predicted: self._predicted,
            NotAdmitted: self._not_admitted,
            Admitted: self._has_place,
            StartedAlone: self._started_alone,
            TurnsChanged: self._turns_changed,
            Evicted: self._evicted,
            HostFull: self._host_full,
            Left: self._left,
            EndReached: self._finished,
        }

    def observe(self, fact: Fact, now: float) -> None:
        """Notes the fact in the account of its request, if there is one."""
        self._observers[type(fact)](fact, now)

    def _arrived(self, fact: Arrived, _: float) -> None:
        scheduled, now = fact.scheduled, fact.at
        if not self.accounts.open(scheduled.request, fact.placement):
            return
        facts: _Known = {"prompt_tokens": scheduled.prompt_len, "max_new_tokens": scheduled.max_new_tokens}
        if scheduled.output_len:
            facts["resumed_tokens"] = scheduled.output_len
        if scheduled.priority:
            facts["priority"] = scheduled.priority
        self._note(scheduled, "arrived", now, self._standing(facts, scheduled, now))
        self._note_forecast(scheduled, now)
        self._fresh.append(scheduled)

    def _turned_away(self, fact: TurnedAway, _: float) -> None:
        request = fact.request
        self.accounts.open(request, fact.placement)
        self.accounts.note(request.request_id, "refused", fact.at, {"reason": fact.reason})
        self.accounts.close(request.request_id)

    def _adopted(self, fact: Adopted, now: float) -> None:
        scheduled = fact.scheduled
        if self.accounts.open(scheduled.request):
            self._note(scheduled, "adopted", now, {"output_tokens": scheduled.output_len})

    def _predicted(self, fact: Predicted, now: float) -> None:
        self._note_forecast(fact.scheduled, now)

    def _note_forecast(self, scheduled: ScheduledRequest, now: float) -> None:
        forecast = scheduled.shown_forecast
        if forecast is not None and self._has(scheduled):
            self._note(scheduled, "forecast", now, forecast_facts(forecast))

    def _not_admitted(self, fact: NotAdmitted, now: float) -> None:
        for job in fact.jobs:
            scheduled = self._requests[job.request_id]
            if scheduled.waits_for != "memory" and self._has(job):
                scheduled.waits_for = "memory"
                facts: _Known = {"reason": "memory", "needed_tokens": job.known_len}
                facts.update(self._admission.explain(job, now))
                self._note(job, "waits", now, self._standing(facts, job, now))

    def _has_place(self, fact: Admitted, now: float) -> None:
        scheduled, returns, ahead = fact.scheduled, fact.returns, fact.ahead
        if not self._has(scheduled):
            return
        facts = self._waited(scheduled, now)
        if ahead:
            scheduled.waits_since, scheduled.waits_for = now, "turn"
        if not ahead:
            facts.update(self._admission.explain(scheduled, now) if fact.room is None else fact.room)
        if returns:
            facts["host_tokens"] = scheduled.host_len
            if ahead:
                facts.update(self._kv.explain(scheduled, now))
        self._note(scheduled, "uploaded" if returns else "admitted", now, self._standing(facts, scheduled, now))

    def _started_alone(self, fact: StartedAlone, now: float) -> None:
        scheduled = fact.scheduled
        if self._has(scheduled):
            self._note(scheduled, "started", now, self._standing(self._waited(scheduled, now), scheduled, now))

    def _turns_changed(self, fact: TurnsChanged, now: float) -> None:
        was, runs = set(fact.before), set(fact.after)
        for request_id in was - runs:
            scheduled = self._admitted.get(request_id)
            if scheduled is not None and self._has(scheduled) and not scheduled.stalled:
                scheduled.waits_since, scheduled.waits_for = now, "turn"
                self._note(scheduled, "paused", now, self._standing({}, scheduled, now))
        for request_id in runs - was:
            scheduled = self._requests[request_id]
            if scheduled.waits_for == "turn":
                facts = self._standing(self._waited(scheduled, now), scheduled, now)
                self._note(scheduled, "continues", now, facts)

    def _evicted(self, fact: Evicted, now: float) -> None:
        scheduled = fact.scheduled
        if not self._has(scheduled):
            return
        facts: _Known = {"computed_tokens": scheduled.computed_len, "short_blocks": fact.short_blocks}
        facts.update(self._kv.explain(scheduled, now))
        self._note(scheduled, "offloaded" if fact.to_host else "preempted", now, self._standing(facts, scheduled, now))
        scheduled.waits_since, scheduled.waits_for = now, ""

    def _host_full(self, fact: HostFull, now: float) -> None:
        self._note(fact.scheduled, "host_full", now, {"computed_tokens": fact.scheduled.computed_len})

    def _left(self, fact: Left, now: float) -> None:
        scheduled = fact.scheduled
        self._note(scheduled, fact.why, now, {"output_tokens": scheduled.output_len})
        self.accounts.close(scheduled.request_id)

    def _finished(self, fact: EndReached, now: float) -> None:
        scheduled = fact.scheduled
        if not self._has(scheduled):
            return
        facts: _Known = {
            "reason": fact.status.finish_reason or "",
            "output_tokens": scheduled.output_len,
            "ran_s": scheduled.ran_s,
            "all_waits_s": scheduled.waited_s,
            "cached_tokens": scheduled.cached_len,
            "num_drops": scheduled.num_preemptions,
            "num_offloads": (scheduled.num_moves + 1) // 2,
        }
        forecast, brought = scheduled.shown_forecast, fact.brought
        if forecast is not None:
            facts["predicted_tokens"] = forecast.mean
        if brought is not None:
            facts |= {"brought_tokens": brought.num_tokens, "brought_from": brought.tier.name.lower()}
            facts |= {
                "prompt_tokens": scheduled.prompt_len,
                "brought_s": brought.seconds,
                "compute_s": brought.compute_s,
            }
        self._note(scheduled, "finished", now, facts)
        self.accounts.close(scheduled.request_id)

    def promised(self, made: Promise, now: float) -> None:
        """Notes the promise in the account of its request, if there is one."""
        if made.request_id in self.accounts:
            self.accounts.note(made.request_id, "promised", now, promise_facts(made))

    def settle(self, has_worker: bool, now: float) -> list[Instruction]:
        """Ends a scheduling point: notes why new requests got no place; returns the accounts of requests that left."""
        if self._fresh:
            self._explain_waits(has_worker, now)
        return [account_closed(account) for account in self.accounts.pop_closed()] if self.accounts.has_closed else []

    def _explain_waits(self, has_worker: bool, now: float) -> None:
        for scheduled in self._fresh:
            request_id = scheduled.request_id
            if request_id in self._admitted or scheduled.waits_for or self._requests.get(request_id) is not scheduled:
                continue
            full = len(self._admitted) >= self._places.num
            scheduled.waits_for = ("places" if full else "others") if has_worker else "worker"
            facts: _Known = {"reason": scheduled.waits_for, "max_num_seqs": self._places.num}
            self._note(scheduled, "waits", now, self._standing(facts, scheduled, now))
        self._fresh.clear()

    def _waited(self, scheduled: ScheduledRequest, now: float) -> _Known:
        """Ends a wait of the request; returns its seconds as a fact."""
        waited_s = now - scheduled.waits_since
        scheduled.waited_s += waited_s
        scheduled.waits_for = ""
        return {"waited_s": waited_s}

    def _moved(self, job: Job, kind: str, now: float) -> None:
        if self._has(job):
            self.accounts.note(job.request_id, kind, now, self._order.explain(job, now))

    def _has(self, job: Job) -> bool:
        return job.request_id in self.accounts

    def _note(self, job: Job, kind: str, now: float, facts: Facts) -> None:
        self.accounts.note(job.request_id, kind, now, facts)

    def _standing(self, facts: _Known, job: Job, now: float) -> _Known:
        """Adds to ``facts`` the numbers of requests with a place and waiting, and the job's numbers from the order."""
        num_admitted = len(self._admitted)
        facts["num_admitted"], facts["num_waiting"] = num_admitted, len(self._requests) - num_admitted
        facts.update(self._order.explain(job, now))
        facts.update(self._shares.explain(job))
        return facts


def forecast_facts(forecast: Forecast) -> _Known:
    """Returns a forecast as named numbers: its mean, its quantiles as ``q50_tokens``, and its source."""
    facts: _Known = {"source": forecast.source, "version": forecast.version, "num_samples": forecast.num_samples}
    facts["mean_tokens"] = forecast.mean
    for level, value in zip(QUANTILES, forecast.quantiles, strict=True):
        facts[f"q{level * 100:g}_tokens"] = value
    return facts


def promise_facts(made: Promise) -> _Known:
    """Returns a promise as named numbers; ``coarse`` only where the promise is."""
    facts: _Known = {"p50_s": made.p50_s, "p90_s": made.p90_s}
    if made.coarse:
        facts["coarse"] = 1
    return facts


def account_closed(account: Account) -> AccountClosed:
    """Returns the instruction that passes an account on."""
    request = account.request
    assert request.origin is not None
    parts = (account.placement, b"".join(account.decisions), account.num_left_out, request.tenant, request.prompt_len)
    return AccountClosed(request.request_id, request.attempt, request.origin, *parts)
