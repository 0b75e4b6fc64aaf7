"""What a replica's scheduler notes of its decisions, and from which numbers of its parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from core.decisions import Facts
from core.forecast import QUANTILES, Forecast
from core.request import Request, SequenceStatus
from policies.interfaces import ReplicaPolicies
from policies.job import Job, ScheduledRequest
from policies.replica.events import AccountClosed, Instruction
from policies.replica.trace_log import Account, Journal

_Known = dict[str, float | str]


class ReplicaTrace:
    """Asks the parts for their numbers when a decision about a job has been taken, and only then.

    Of a job without an account (``Journal``) nothing is asked.

    Args:
        max_num_seqs: As in ``SchedulerLimits``.
        tracked: All requests of the scheduler, by id; ``admitted`` are those with a place.
    """

    def __init__(
        self,
        policies: ReplicaPolicies,
        max_num_seqs: int,
        tracked: Mapping[str, ScheduledRequest],
        admitted: Mapping[str, ScheduledRequest],
    ) -> None:
        self.journal = Journal()
        self._order, self._admission, self._kv = policies.order, policies.admission, policies.kv
        self._max_num_seqs = max_num_seqs
        self._tracked, self._admitted = tracked, admitted
        self._fresh: list[ScheduledRequest] = []
        self._order.on_move = self._moved

    def arrived(self, tracked: ScheduledRequest, placement: bytes, now: float) -> None:
        if not self.journal.open(tracked.request, placement):
            return
        job = tracked
        facts: _Known = {"prompt_tokens": job.prompt_len, "max_new_tokens": job.max_new_tokens}
        if job.output_len:
            facts["resumed_tokens"] = job.output_len
        if job.priority:
            facts["priority"] = job.priority
        self._note(job, "arrived", now, self._standing(facts, job, now))
        self.foreseen(tracked, now)
        self._fresh.append(tracked)

    def turned_away(self, request: Request, placement: bytes, reason: str, now: float) -> None:
        """It will never run here."""
        self.journal.open(request, placement)
        self.journal.note(request.request_id, "refused", now, {"reason": reason})
        self.journal.close(request.request_id)

    def adopted(self, tracked: ScheduledRequest, now: float) -> None:
        """The worker had it before this scheduler came; nobody knows any more how it got there."""
        if self.journal.open(tracked.request):
            self._note(tracked, "adopted", now, {"output_tokens": tracked.output_len})

    def foreseen(self, tracked: ScheduledRequest, now: float) -> None:
        job = tracked
        if job.forecast is not None and self._has(job):
            self._note(job, "forecast", now, forecast_facts(job.forecast))

    def refused(self, jobs: Iterable[Job], now: float) -> None:
        """Admission has said no to these; noted once a wait."""
        for job in jobs:
            tracked = self._tracked[job.request_id]
            if tracked.waits_for != "memory" and self._has(job):
                tracked.waits_for = "memory"
                facts: _Known = {"reason": "memory", "needed_tokens": job.known_len}
                facts.update(self._admission.explain(job, now))
                self._note(job, "waits", now, self._standing(facts, job, now))

    def admitted(self, tracked: ScheduledRequest, *, returns: bool, ahead: bool, now: float) -> None:
        """It has a place; if it ``returns``, its KV comes back from the host, ``ahead`` of its turn if the KV policy
        has called it back.
        """
        job = tracked
        if not self._has(job):
            return
        facts = self._waited(tracked, now)
        if ahead:
            tracked.waits_since, tracked.waits_for = now, "turn"
        if not ahead:
            facts.update(self._admission.explain(job, now))
        if returns:
            facts["host_tokens"] = job.host_len
            if ahead:
                facts.update(self._kv.explain(job, now))
        self._note(job, "uploaded" if returns else "admitted", now, self._standing(facts, job, now))

    def started(self, tracked: ScheduledRequest, now: float) -> None:
        """The worker has started it by itself, as a standby."""
        if self._has(tracked):
            self._note(tracked, "started", now, self._standing(self._waited(tracked, now), tracked, now))

    def turns(self, before: Iterable[str], after: Iterable[str], now: float) -> None:
        """Who was to execute until now, and who is from now on: a place alone is no turn."""
        was, runs = set(before), set(after)
        for request_id in was - runs:
            tracked = self._admitted.get(request_id)
            if tracked is not None and self._has(tracked) and not tracked.stalled:
                tracked.waits_since, tracked.waits_for = now, "turn"
                self._note(tracked, "paused", now, self._standing({}, tracked, now))
        for request_id in runs - was:
            tracked = self._tracked[request_id]
            if tracked.waits_for == "turn":
                facts = self._standing(self._waited(tracked, now), tracked, now)
                self._note(tracked, "continues", now, facts)

    def gave_way(self, tracked: ScheduledRequest, *, to_host: bool, short_blocks: int, now: float) -> None:
        """It is about to lose its place; its KV is moved to the host, or dropped."""
        job = tracked
        if not self._has(job):
            return
        facts: _Known = {"computed_tokens": job.computed_len, "short_blocks": short_blocks}
        facts.update(self._kv.explain(job, now))
        self._note(job, "offloaded" if to_host else "preempted", now, self._standing(facts, job, now))
        tracked.waits_since, tracked.waits_for = now, ""

    def host_full(self, tracked: ScheduledRequest, now: float) -> None:
        self._note(tracked, "host_full", now, {"computed_tokens": tracked.computed_len})

    def left(self, tracked: ScheduledRequest, why: str, now: float) -> None:
        """It is here no more, though it had not ended."""
        self._note(tracked, why, now, {"output_tokens": tracked.output_len})
        self.journal.close(tracked.request_id)

    def finished(self, tracked: ScheduledRequest, status: SequenceStatus, now: float) -> None:
        job = tracked
        if not self._has(job):
            return
        facts: _Known = {
            "reason": status.finish_reason or "",
            "output_tokens": job.output_len,
            "ran_s": tracked.ran_s,
            "all_waits_s": tracked.waited_s,
            "cached_tokens": job.cached_len,
            "num_drops": tracked.num_preemptions,
            "num_offloads": (tracked.num_moves + 1) // 2,
        }
        if job.forecast is not None:
            facts["predicted_tokens"] = job.forecast.mean
        self._note(job, "finished", now, facts)
        self.journal.close(job.request_id)

    def settle(self, has_worker: bool, now: float) -> list[Instruction]:
        """After a scheduling point: why those who came got no place; what was decided about those who are gone."""
        if self._fresh:
            self._explain_waits(has_worker, now)
        return [account_closed(account) for account in self.journal.take_closed()] if self.journal.has_closed else []

    def _explain_waits(self, has_worker: bool, now: float) -> None:
        for tracked in self._fresh:
            request_id = tracked.request_id
            if request_id in self._admitted or tracked.waits_for or self._tracked.get(request_id) is not tracked:
                continue
            full = len(self._admitted) >= self._max_num_seqs
            tracked.waits_for = ("places" if full else "others") if has_worker else "worker"
            facts: _Known = {"reason": tracked.waits_for, "max_num_seqs": self._max_num_seqs}
            self._note(tracked, "waits", now, self._standing(facts, tracked, now))
        self._fresh.clear()

    def _waited(self, tracked: ScheduledRequest, now: float) -> _Known:
        """A wait is over: how long it was."""
        waited_s = now - tracked.waits_since
        tracked.waited_s += waited_s
        tracked.waits_for = ""
        return {"waited_s": waited_s}

    def _moved(self, job: Job, kind: str, now: float) -> None:
        if self._has(job):
            self.journal.note(job.request_id, kind, now, self._order.explain(job, now))

    def _has(self, job: Job) -> bool:
        return job.request_id in self.journal

    def _note(self, job: Job, kind: str, now: float, facts: Facts) -> None:
        self.journal.note(job.request_id, kind, now, facts)

    def _standing(self, facts: _Known, job: Job, now: float) -> _Known:
        """``facts``, with how many have a place and how many wait, and where the order has the job."""
        num_admitted = len(self._admitted)
        facts["num_admitted"], facts["num_waiting"] = num_admitted, len(self._tracked) - num_admitted
        facts.update(self._order.explain(job, now))
        return facts


def forecast_facts(forecast: Forecast) -> _Known:
    """A forecast as named numbers: its mean, its quantiles as ``q50_tokens``, and where it comes from."""
    facts: _Known = {"source": forecast.source, "version": forecast.version, "num_samples": forecast.num_samples}
    facts["mean_tokens"] = forecast.mean
    for level, value in zip(QUANTILES, forecast.quantiles, strict=True):
        facts[f"q{level * 100:g}_tokens"] = value
    return facts


def account_closed(account: Account) -> AccountClosed:
    """What of an account is passed on."""
    request = account.request
    assert request.origin is not None
    parts = (account.placement, b"".join(account.decisions), account.num_left_out)
    return AccountClosed(request.request_id, request.attempt, request.origin, *parts)
