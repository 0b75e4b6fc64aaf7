"""The scheduler of one model replica: a state machine, ``handle(event, now) -> [Instruction]``.

What it hears goes on the books (``WorkerMirror``); from these it is decided whose turn it is (``StepSelector``), and
the worker is told (``ReplicaPlans``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from core.costs import StepCost
from core.messages.forecasts import ForecastMade
from core.messages.plans import FinishedSequence, SlotProgress, StepReport, WorkerState
from core.messages.requests import Key
from core.request import Request, Residency, SequenceStatus
from kvcache.cache_journal import CacheMirror
from policies.interfaces import ReplicaPolicies
from policies.job import ScheduledRequest
from policies.replica.events import (
    BatchBroken,
    CacheTold,
    CostLearned,
    Event,
    ForecastsArrived,
    Instruction,
    RefuseRequest,
    RequestEnded,
    RequestsAborted,
    RequestsArrived,
    RequestStarted,
    SendPlan,
    StepsRan,
    WorkerConnected,
    WorkerLost,
    WorkerReported,
)
from policies.replica.mirror import WorkerMirror
from policies.replica.planner import ReplicaPlans
from policies.replica.step_selector import StepSelector
from policies.replica.trace import ReplicaTrace
from policies.replica.trace_log import Account

COST_CHANGE = 0.05
"""A price that differs by more than this share is another one."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds on what a plan holds.

    Attributes:
        max_num_seqs: Admitted requests at most; the worker's own bound of a step.
        standby_slots: Requests shipped ahead so that a place never stays empty for a round trip.
        grant_lead_s: Grants are renewed when less than this is left of one, so that nobody rests between the end of a
            grant and the plan that follows the report of it; they last twice as long at least. 0 where reports and
            plans take no time.
    """

    max_num_seqs: int
    standby_slots: int
    grant_lead_s: float = 0.0


class ReplicaScheduler:
    """Orders, admits and preempts the requests of one replica.

    Args:
        policies: The parts that decide; this object owns them from now on.
        limits: Bounds of a plan.
    """

    def __init__(self, policies: ReplicaPolicies, limits: SchedulerLimits) -> None:
        self.order, self.admission = policies.order, policies.admission
        self.limits = limits
        self._shadow = WorkerMirror(policies.order.changed)
        self._notes = ReplicaTrace(policies, limits.max_num_seqs, self._shadow.tracked, self._shadow.admitted)
        self.turns = StepSelector(policies, limits.max_num_seqs, self._shadow, self._notes)
        self._plans = ReplicaPlans(policies.order, limits.grant_lead_s, self._shadow)

    @property
    def num_waiting(self) -> int:
        return self._shadow.num_waiting

    @property
    def num_admitted(self) -> int:
        return len(self._shadow.admitted)

    @property
    def num_running(self) -> int:
        """Admitted requests that are to execute next."""
        return len(self.turns.running)

    @property
    def num_offloaded(self) -> int:
        """Requests with KV on the host, or on its way there."""
        return len(self._shadow.hosted)

    @property
    def num_preemptions(self) -> int:
        """Ordered so far, of all requests."""
        return self.turns.num_preemptions

    @property
    def cache(self) -> CacheMirror:
        """The worker's, where its reports tell of it."""
        return self._shadow.cache

    def resting(self) -> tuple[Key, ...]:
        """All that is here, if it all waits for clients that do not read: else nothing."""
        return self._shadow.resting()

    def unknown(self, keys: Iterable[Key]) -> tuple[Key, ...]:
        """Those of these attempts that are neither here nor ended lately."""
        return tuple(key for key in keys if not self._shadow.knows(key))

    def accounts(self, response_id: str) -> Iterator[Account]:
        """What has been decided so far about the requests of an answer that are here. O(requests)."""
        return self._notes.journal.of(response_id)

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """The only mutator. ``now`` is seconds on the caller's monotonic clock."""
        out: list[Instruction] = []
        match event:
            case RequestsArrived():
                out += self._arrive(event.requests, now, event.placements)
            case RequestsAborted():
                self._abort(event.keys, now)
            case WorkerReported():
                out += self._take_report(event.report, now)
            case StepsRan():
                self._take_steps(event, now)
            case WorkerConnected():
                out += self._connect(event.state, now)
            case WorkerLost():
                self._lose_all(now)
            case ForecastsArrived():
                self._foresee(event.made, now)
            case CostLearned():
                self._learn_cost(event.cost)
        out += self._replan(now)
        return out + self._notes.settle(self._shadow.worker is not None, now)

    def _arrive(
        self, requests: tuple[Request, ...], now: float, placements: tuple[bytes, ...] = ()
    ) -> list[Instruction]:
        refused: list[Instruction] = []
        for index, request in enumerate(requests):
            placement = placements[index] if index < len(placements) else b""
            if self._shadow.knows((request.request_id, request.attempt)):
                continue  # a duplicate delivery, or one that comes after the end
            if request.request_id in self._shadow.tracked:
                self._forget(request.request_id, "superseded", now)
            problem = self._never_fits(request)
            if problem is not None:
                self._notes.turned_away(request, placement, problem.message, now)
                refused.append(problem)
                continue
            tracked = self._shadow.add(request, now)
            self.order.add(tracked, now)
            self._notes.arrived(tracked, placement, now)
        return refused

    def _never_fits(self, request: Request) -> RefuseRequest | None:
        worker = self._shadow.worker
        if worker is None or request.max_total_len <= worker.max_model_len:
            return None
        limit = worker.max_model_len
        message = f"prompt and max_tokens make {request.max_total_len} tokens, the worker holds at most {limit}"
        return RefuseRequest(request.request_id, request.attempt, "max_tokens", message)

    def _foresee(self, made: Iterable[ForecastMade], now: float) -> None:
        for each in made:
            tracked = self._shadow.tracked.get(each.request_id)
            if tracked is not None and tracked.request.attempt == each.attempt:
                tracked.request = replace(tracked.request, forecast=each.forecast)
                tracked.forecast = each.forecast
                self.order.foreseen(tracked)
                self._notes.foreseen(tracked, now)

    def _abort(self, keys: tuple[Key, ...], now: float) -> None:
        for request_id, attempt in keys:
            tracked = self._shadow.tracked.get(request_id)
            if tracked is not None and tracked.request.attempt <= attempt:
                self._forget(request_id, "aborted", now)

    def _forget(self, request_id: str, why: str, now: float) -> None:
        tracked = self._let_go(request_id)
        if tracked.shipped_in is not None:
            self._shadow.stale = True  # the worker forgets what a plan no longer names
        self._notes.left(tracked, why, now)

    def _let_go(self, request_id: str) -> ScheduledRequest:
        tracked = self._shadow.remove(request_id)
        self.order.remove(tracked)
        return tracked

    def _connect(self, state: WorkerState, now: float) -> list[Instruction]:
        """Takes over what the worker holds, in its order and ahead of what arrived meanwhile; both go on at once."""
        shadow = self._shadow
        waiting = [each for rid, each in shadow.tracked.items() if rid not in shadow.admitted]
        newcomers = [*shadow.admitted.values(), *waiting]
        self._lose_worker()
        shadow.connect(state, now)
        self._price()
        for adopted in shadow.tracked.values():
            self.order.add(adopted, now)
        for progress in state.report.progress:
            self._notes.adopted(shadow.tracked[progress.request_id], now)
        refused = [out for known in newcomers for out in self._arrive((known.request,), known.arrived_at)]
        return refused + self._take_report(state.report, now)

    def _learn_cost(self, cost: StepCost) -> None:
        """The order hears of prices that have changed: every rank is worked out anew then."""
        if self._plans.cost is None or not cost.is_like(self._plans.cost, COST_CHANGE):
            self._plans.cost = cost
            self._price()

    def _price(self) -> None:
        worker, cost = self._shadow.worker, self._plans.cost
        if worker is not None and cost is not None:
            self.order.price(cost, worker.num_blocks * worker.block_size)

    def _lose_all(self, now: float) -> None:
        for tracked in self._shadow.tracked.values():
            self._notes.left(tracked, "worker_lost", now)
        self._lose_worker()

    def _lose_worker(self) -> None:
        for tracked in self._shadow.tracked.values():
            self.order.remove(tracked)
        self._shadow.lose_worker()
        self.turns.running = []
        self._plans.begin_anew()

    def _take_report(self, report: StepReport, now: float) -> list[Instruction]:
        if not self._shadow.take_report(report):
            return []
        told: list[Instruction] = [CacheTold(notice) for notice in self._shadow.take_notices(report.cache)]
        tracked_by_id = self._shadow.tracked
        for progress in report.progress:
            tracked = tracked_by_id.get(progress.request_id)
            if tracked is not None and tracked.told != progress:
                told += self._take_progress(tracked, progress, now)
        return told + [out for finished in report.finished for out in self._end(finished, now)]

    def _take_steps(self, event: StepsRan, now: float) -> None:
        worker, tracked_by_id = self._shadow.worker, self._shadow.tracked
        assert worker is not None
        for request_id in event.request_ids:
            tracked = tracked_by_id[request_id]
            tracked.decode(event.num_steps, event.duration_s, worker.block_size)
            self.order.changed(tracked)
            tracked.last_ran_at = now
            self.order.ran(tracked, event.duration_s, now)

    def _take_progress(self, tracked: ScheduledRequest, progress: SlotProgress, now: float) -> list[Instruction]:
        shadow = self._shadow
        if tracked.request.attempt != progress.attempt:
            return []
        started: list[Instruction] = []
        if progress.ran_s > 0 and not tracked.started:
            started.append(RequestStarted(tracked.start(progress.cached_len, progress.ran_s, now)))
        ran_s = shadow.take_progress(tracked, progress)
        if ran_s > 0:
            tracked.last_ran_at = now
            self.order.ran(tracked, ran_s, now)
        if progress.num_preemptions < tracked.num_preemptions or progress.num_moves < tracked.num_moves:
            return started  # it does not know the latest orders yet
        if tracked.residency is Residency.HOST and progress.residency is Residency.DEVICE:
            self._take_refusal(tracked, now)
        elif tracked.residency is Residency.HOST:
            return started
        elif progress.num_blocks > 0 and progress.request_id not in shadow.admitted:
            shadow.admitted[progress.request_id] = tracked  # a standby that the worker started by itself
            self._notes.started(tracked, now)
        return started

    def _take_refusal(self, tracked: ScheduledRequest, now: float) -> None:
        """There was no room on the host, or nothing to move: its KV is dropped like that of any preempted one."""
        tracked.residency, tracked.told = Residency.DEVICE, None
        self._notes.host_full(tracked, now)
        self._shadow.drop_kv(tracked)

    def _end(self, finished: FinishedSequence, now: float) -> list[Instruction]:
        self._shadow.remember((finished.request_id, finished.attempt))
        tracked = self._shadow.tracked.get(finished.request_id)
        if tracked is None or tracked.request.attempt != finished.attempt:
            return []  # reported again before the acknowledgement arrived, or aborted meanwhile
        started: list[Instruction] = []
        if finished.ran_s > 0 and not tracked.started:
            started.append(RequestStarted(tracked.start(finished.cached_len, finished.ran_s, now)))
        job = self._let_go(finished.request_id)
        job.output_len = finished.output_len
        self._notes.finished(tracked, finished.status, now)
        censored = finished.status is not SequenceStatus.FINISHED_STOPPED
        self.order.learn(job, censored=censored)
        self.admission.learn(finished.output_len, censored=censored)
        return [*started, RequestEnded(finished, job.arrived_at, now)]

    def _replan(self, now: float) -> list[Instruction]:
        """A scheduling point: decides anew, and makes a plan if it would say something new."""
        if self._shadow.worker is None:
            return []
        broken: list[Instruction] = []
        if not self.turns.decide(now):
            broken.append(self._break_off(now))
        running = self.turns.running
        standby = [job.request_id for job in itertools.islice(self.turns.waiting(now), self.limits.standby_slots)]
        if not self._plans.is_due(running, standby):
            return broken
        if self.order.preemptive:
            self._notes.turns(self._plans.said(), [job.request_id for job in running], now)
        return [*broken, SendPlan(self._plans.write(running, standby, self.turns.reserve_blocks()))]

    def _break_off(self, now: float) -> BatchBroken:
        """Forgets everything; what the worker has of it is free at the next step boundary."""
        keys = self._shadow.keys()
        for request_id, _ in keys:
            self._forget(request_id, "batch_broken", now)
        if self._shadow.stale:
            self._shadow.note_preemption()
        return BatchBroken(keys)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the books, the turns and the journal agree."""
        self._notes.journal.check_integrity(set(self._shadow.tracked))
        self._shadow.check_integrity()
        self.turns.check_integrity()
