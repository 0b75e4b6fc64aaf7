"""The scheduler of one model replica: a state machine, ``handle(event, now) -> [Instruction]``.

It keeps a shadow of the worker's state from step reports (the worker is the truth) and answers with plans. Each
plan is a full snapshot: the admitted requests in rank order, then the standbys that may take the place of whoever
ends before the next plan comes (design section 3, rules 1-5).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from core.costs import StepCost
from core.errors import IntegrityError
from core.messages import (
    FinishedSequence,
    ForecastMade,
    Key,
    Plan,
    Slot,
    SlotProgress,
    StepReport,
    WorkerReady,
    WorkerState,
)
from core.request import Request, Residency, SequenceStatus
from policies.job import Job
from policies.journal import Account
from policies.protocols import Admission, KvMoves, KvPolicy, KvView, Order
from policies.replica_events import (
    BatchBroken,
    CostLearnt,
    Event,
    ForecastsArrived,
    Instruction,
    RefuseRequest,
    RequestEnded,
    RequestsAborted,
    RequestsArrived,
    SendPlan,
    StepsRan,
    WorkerConnected,
    WorkerLost,
    WorkerReported,
)
from policies.replica_notes import ReplicaNotes
from policies.selection import Selection, Selector
from policies.tracked import Tracked, make_tracked

COST_CHANGE = 0.05
"""A price that differs by more than this share is another one."""

NUM_REMEMBERED = 4096
"""Ended requests that a Scheduler still knows when asked: the last tokens may be on their way to the ingress."""


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


@dataclass(frozen=True, slots=True)
class ReplicaPolicies:
    """What decides on one replica."""

    order: Order
    admission: Admission
    kv: KvPolicy


class ReplicaScheduler:
    """Orders, admits and preempts the requests of one replica.

    Args:
        policies: The parts that decide; this object owns them from now on.
        limits: Bounds of a plan.
    """

    def __init__(self, policies: ReplicaPolicies, limits: SchedulerLimits) -> None:
        self.order, self.admission, self.kv = policies.order, policies.admission, policies.kv
        self.limits = limits
        self._cost: StepCost | None = None
        self._tracked: dict[str, Tracked] = {}
        self._admitted: dict[str, Tracked] = {}  # in order of admission
        self._undelivered: dict[str, Tracked] = {}  # shipped, and the worker may not have them yet
        self._hosted: dict[str, Tracked] = {}  # with KV on the host, or on its way there
        self._running: list[Job] = []  # those of the admitted that are to execute, best first
        self._standby: list[str] = []
        self._sent: list[str] = []  # those that the latest plan lets execute
        self._contended = False  # whether anybody else wanted to execute by then
        self._recent: dict[Key, None] = {}  # ended lately, oldest first
        self._worker: WorkerReady | None = None
        self._lease = 0
        self._plan_seq = 0
        self._report_seq = 0
        self._applied_plan_seq = 0  # the worker's plan in force at the last report
        self._shared_blocks = 0  # as last reported
        self._short_blocks = 0  # as last reported
        self._preempted_in = 0  # plan that carries the latest preemption: older pressure is already answered
        self._dirty = False
        self.num_preemptions = 0  # ordered so far, of all requests
        parts = (self.order, self.admission, self.kv)
        self._notes = ReplicaNotes(parts, limits.max_num_seqs, self._tracked, self._admitted)

    @property
    def num_waiting(self) -> int:
        return len(self._tracked) - len(self._admitted)

    @property
    def num_admitted(self) -> int:
        return len(self._admitted)

    @property
    def num_running(self) -> int:
        """Admitted requests that are to execute next."""
        return len(self._running)

    @property
    def num_offloaded(self) -> int:
        """Requests with KV on the host, or on its way there."""
        return len(self._hosted)

    def resting(self) -> tuple[Key, ...]:
        """All that is here, if it all waits for clients that do not read: else nothing."""
        tracked = self._tracked.values()
        if not all(each.stalled for each in tracked):
            return ()
        return tuple((each.request.request_id, each.request.attempt) for each in tracked)

    def unknown(self, keys: Iterable[Key]) -> tuple[Key, ...]:
        """Those of these attempts that are neither here nor ended lately."""
        return tuple(key for key in keys if key not in self._recent and not self._knows(*key))

    def _knows(self, request_id: str, attempt: int) -> bool:
        tracked = self._tracked.get(request_id)
        return tracked is not None and tracked.request.attempt >= attempt

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
            case CostLearnt():
                self._learn_cost(event.cost)
        out += self._replan(now)
        return out + self._notes.settle(self._worker is not None, now)

    def accounts(self, response_id: str) -> Iterator[Account]:
        """What has been decided so far about the requests of an answer that are here. O(requests)."""
        return self._notes.journal.of(response_id)

    def _arrive(
        self, requests: tuple[Request, ...], now: float, placements: tuple[bytes, ...] = ()
    ) -> list[Instruction]:
        refused: list[Instruction] = []
        for index, request in enumerate(requests):
            placement = placements[index] if index < len(placements) else b""
            known = self._tracked.get(request.request_id)
            if known is not None and known.request.attempt >= request.attempt:
                continue  # a duplicate delivery
            if (request.request_id, request.attempt) in self._recent:
                continue  # one that comes after the end
            if known is not None:
                self._forget(request.request_id, "superseded", now)
            problem = self._never_fits(request)
            if problem is not None:
                self._notes.turned_away(request, placement, problem.message, now)
                refused.append(problem)
                continue
            tracked = self._track(request, now)
            self._notes.arrived(tracked, placement, now)
        return refused

    def _track(self, request: Request, now: float) -> Tracked:
        tracked = self._tracked[request.request_id] = make_tracked(request, now)
        self.order.add(tracked.job, now)
        return tracked

    def _never_fits(self, request: Request) -> RefuseRequest | None:
        if self._worker is None or request.max_total_len <= self._worker.max_model_len:
            return None
        limit = self._worker.max_model_len
        message = f"prompt and max_tokens make {request.max_total_len} tokens, the worker holds at most {limit}"
        return RefuseRequest(request.request_id, request.attempt, "max_tokens", message)

    def _foresee(self, made: Iterable[ForecastMade], now: float) -> None:
        for each in made:
            tracked = self._tracked.get(each.request_id)
            if tracked is not None and tracked.request.attempt == each.attempt:
                tracked.request = replace(tracked.request, forecast=each.forecast)
                tracked.job.forecast = each.forecast
                self.order.foreseen(tracked.job)
                self._notes.foreseen(tracked, now)

    def _abort(self, keys: tuple[tuple[str, int], ...], now: float) -> None:
        for request_id, attempt in keys:
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.request.attempt <= attempt:
                self._forget(request_id, "aborted", now)

    def _forget(self, request_id: str, why: str, now: float) -> None:
        tracked = self._let_go(request_id)
        if tracked.shipped_in is not None:
            self._dirty = True  # the worker forgets what a plan no longer names
        self._notes.left(tracked, why, now)

    def _let_go(self, request_id: str) -> Tracked:
        tracked = self._tracked.pop(request_id)
        self.order.remove(tracked.job)
        for table in (self._admitted, self._undelivered, self._hosted):
            table.pop(request_id, None)
        return tracked

    def _connect(self, state: WorkerState, now: float) -> list[Instruction]:
        """Takes over what the worker holds, in its order and ahead of what arrived meanwhile; both go on at once."""
        waiting = [each for rid, each in self._tracked.items() if rid not in self._admitted]
        newcomers = [*self._admitted.values(), *waiting]
        self._lose_worker()
        self._worker, self._lease = state.ready, state.lease
        self._price()
        for request in state.held:
            adopted = self._track(request, now)
            adopted.shipped_in, adopted.delivered = 0, True
        for progress in state.report.progress:
            adopted = self._tracked[progress.request_id]
            adopted.num_preemptions, adopted.num_moves = progress.num_preemptions, progress.num_moves
            adopted.residency = progress.residency
            self._note_host(adopted)
            self._notes.adopted(adopted, now)
        refused = [out for known in newcomers for out in self._arrive((known.request,), known.job.arrived_at)]
        self._dirty = True
        return refused + self._take_report(state.report, now)

    def _learn_cost(self, cost: StepCost) -> None:
        """The order hears of prices that have changed: every rank is worked out anew then."""
        if self._cost is None or not cost.is_like(self._cost, COST_CHANGE):
            self._cost = cost
            self._price()

    def _price(self) -> None:
        if self._worker is not None and self._cost is not None:
            self.order.price(self._cost, self._worker.num_blocks * self._worker.block_size)

    def _lose_all(self, now: float) -> None:
        for tracked in self._tracked.values():
            self._notes.left(tracked, "worker_lost", now)
        self._lose_worker()

    def _lose_worker(self) -> None:
        self._worker = None
        self._shared_blocks = self._short_blocks = 0
        self._plan_seq = self._report_seq = self._applied_plan_seq = self._preempted_in = 0
        for tracked in self._tracked.values():
            self.order.remove(tracked.job)
        for table in (self._tracked, self._admitted, self._undelivered, self._hosted):
            table.clear()
        self._running, self._standby, self._sent = [], [], []

    def _take_report(self, report: StepReport, now: float) -> list[Instruction]:
        worker = self._worker
        if worker is None or report.worker_incarnation != worker.worker_incarnation or report.lease != self._lease:
            return []
        if report.report_seq <= self._report_seq:
            return []
        self._report_seq = report.report_seq
        self._applied_plan_seq = report.plan_seq
        self._shared_blocks = report.shared_blocks
        self._short_blocks = report.short_blocks
        for progress in report.progress:
            self._take_progress(progress, now)
        for tracked in list(self._undelivered.values()):
            if tracked.shipped_in is not None and report.plan_seq >= tracked.shipped_in:
                tracked.delivered = True
                del self._undelivered[tracked.job.request_id]
        return [out for finished in report.finished for out in self._end(finished, now)]

    def _take_steps(self, event: StepsRan, now: float) -> None:
        assert self._worker is not None
        for request_id in event.request_ids:
            tracked = self._tracked[request_id]
            tracked.decode(event.num_steps, event.duration_s, self._worker.block_size)
            tracked.job.last_ran_at = now
            self.order.ran(tracked.job, event.duration_s, now)

    def _take_progress(self, progress: SlotProgress, now: float) -> None:
        tracked = self._tracked.get(progress.request_id)
        if tracked is None or tracked.request.attempt != progress.attempt:
            return
        assert self._worker is not None
        ran_s = tracked.take(progress, self._worker.block_size)
        self._note_host(tracked)
        if ran_s > 0:
            tracked.job.last_ran_at = now
            self.order.ran(tracked.job, ran_s, now)
        if progress.num_preemptions < tracked.num_preemptions or progress.num_moves < tracked.num_moves:
            return  # it does not know the latest orders yet
        if tracked.residency is Residency.HOST and progress.residency is Residency.DEVICE:
            self._take_refusal(progress.request_id, now)
        elif tracked.residency is Residency.HOST:
            return
        elif progress.num_blocks > 0 and progress.request_id not in self._admitted:
            self._admitted[progress.request_id] = tracked  # a standby that the worker started by itself
            self._notes.started(tracked, now)

    def _take_refusal(self, request_id: str, now: float) -> None:
        """There was no room on the host, or nothing to move: its KV is dropped like that of any preempted one."""
        tracked = self._tracked[request_id]
        tracked.residency = Residency.DEVICE
        self._notes.host_full(tracked, now)
        self._drop_kv(tracked)

    def _end(self, finished: FinishedSequence, now: float) -> list[Instruction]:
        self._remember((finished.request_id, finished.attempt))
        tracked = self._tracked.get(finished.request_id)
        if tracked is None or tracked.request.attempt != finished.attempt:
            return []  # reported again before the acknowledgement arrived, or aborted meanwhile
        job = self._let_go(finished.request_id).job
        job.output_len = finished.output_len
        self._notes.finished(tracked, finished.status, now)
        censored = finished.status is not SequenceStatus.FINISHED_STOPPED
        self.order.learn(job, censored=censored)
        self.admission.learn(finished.output_len, censored=censored)
        return [RequestEnded(finished, job.arrived_at, now)]

    def _remember(self, key: Key) -> None:
        self._recent[key] = None
        if len(self._recent) > NUM_REMEMBERED:
            del self._recent[next(iter(self._recent))]

    def _replan(self, now: float) -> list[Instruction]:
        """A scheduling point: decides anew, and makes a plan if it would say something new."""
        worker = self._worker
        if worker is None:
            return []
        self.order.refresh(now)
        selection = self._select(worker, now)
        for job in selection.newcomers:
            self._admit(job, now)
        if selection.refused:
            self._notes.refused(selection.refused, now)
        self._running = selection.running
        broken: list[Instruction] = []
        if self._short_blocks > 0 or self.order.preemptive or self.kv.watches:
            moves = self.kv.moves(self._view(worker, self._running), now)
            if moves.break_off:
                broken.append(self._break_off(now))
            else:
                self._carry_out(moves, now)
        if not selection.newcomers:
            self._make_way(worker, now)
        standby = [job.request_id for job in itertools.islice(self._waiting(now), self.limits.standby_slots)]
        running = [job.request_id for job in self._running]
        said = [request_id for request_id in self._sent if request_id in self._admitted]
        contended = len(running) < len(self._tracked)
        changed = standby != self._standby or running != said or contended > self._contended
        if not (self._dirty or changed or self._grants_are_used_up()):
            return broken
        if self.order.preemptive and running != said:
            self._notes.turns(said, running, now)
        self._standby, self._sent, self._contended, self._dirty = standby, running, contended, False
        return [*broken, SendPlan(self._plan(worker))]

    def _select(self, worker: WorkerReady, now: float) -> Selection:
        """Who is to execute next; those that rest are left out."""
        residents = [each.job for each in self._admitted.values() if not each.stalled]
        if not self.order.preemptive and (self.num_waiting == 0 or (self._is_answering and not self.kv.evicts)):
            return Selection(residents)  # the blocks that a preemption frees are for those it was made for
        selector = Selector(
            self.admission,
            self.limits.max_num_seqs,
            self._capacity(worker),
            may_start=lambda: self.kv.may_start(self._view(worker, residents)),
        )
        fixed = None if self.kv.evicts else [each.job for each in self._admitted.values()]
        if self.order.preemptive:
            ranked = (job for job in self.order.ranked(now) if not self._tracked[job.request_id].stalled)
            return selector.select(ranked, self._admitted, fixed)
        return selector.select(itertools.chain(residents, self._waiting(now)), self._admitted, fixed)

    @property
    def _is_answering(self) -> bool:
        """A preemption or an offload is on its way: what is short now will not be then."""
        return self._applied_plan_seq < self._preempted_in or self._blocks_are_coming

    @property
    def _blocks_are_coming(self) -> bool:
        return any(tracked.is_leaving for tracked in self._hosted.values())

    def _waiting(self, now: float) -> Iterator[Job]:
        """Who waits for a place and could use it, best first."""
        return (
            job
            for job in self.order.ranked(now)
            if job.request_id not in self._admitted and not self._tracked[job.request_id].stalled
        )

    def _capacity(self, worker: WorkerReady) -> int:
        """KV tokens that jobs may hold: the pool, with what they share counted for each, less unused ends of blocks."""
        size = worker.block_size
        ends = sum(-each.job.known_len % size for each in self._admitted.values())
        return (worker.num_blocks + self._shared_blocks) * size - ends

    def _view(self, worker: WorkerReady, running: list[Job]) -> KvView:
        """What is ordered to leave counts as gone; what is ordered to come is still needed."""
        size = worker.block_size
        taken = {job.request_id for job in running}
        held = sum(each.num_blocks for each in self._admitted.values()) - self._shared_blocks
        starting = [job.known_len for job in running if self._tracked[job.request_id].num_blocks == 0]
        short = 0 if self._is_answering else self._short_blocks
        on_host = sum(each.blocks_on_host for each in self._hosted.values())
        return KvView(
            running=running,
            idle=[each.job for rid, each in self._admitted.items() if rid not in taken],
            offloaded=[
                each.job for rid, each in self._hosted.items() if each.residency is Residency.HOST and rid not in taken
            ],
            free=(worker.num_blocks - held) * size,
            needed=(sum(-(-known_len // size) for known_len in starting) + short) * size,
            host_free=(worker.num_host_blocks - on_host) * size,
            host_capacity=worker.num_host_blocks * size,
            block_size=size,
            short=short * size,
        )

    def _break_off(self, now: float) -> BatchBroken:
        """Forgets everything; what the worker has of it is free at the next step boundary."""
        keys = tuple((each.request.request_id, each.request.attempt) for each in self._tracked.values())
        for request_id, _ in keys:
            self._forget(request_id, "batch_broken", now)
        if self._dirty:
            self._preempted_in = self._plan_seq + 1
        self._running = []
        return BatchBroken(keys)

    def _carry_out(self, moves: KvMoves, now: float) -> None:
        for job in moves.offload:
            self._preempt(job, Residency.HOST, now)
        for job in moves.drop:
            self._preempt(job, Residency.DEVICE, now)
        for job in moves.upload:
            self._admit(job, now, ahead=True)

    def _admit(self, job: Job, now: float, *, ahead: bool = False) -> None:
        tracked = self._admitted[job.request_id] = self._tracked[job.request_id]
        returns = tracked.residency is Residency.HOST
        if returns:
            self._move(tracked, Residency.DEVICE)
        self._notes.admitted(tracked, returns=returns, ahead=ahead, now=now)

    def _preempt(self, job: Job, to: Residency, now: float) -> None:
        """It gives up its place; its KV is moved to the host, or dropped wherever it is."""
        tracked = self._tracked[job.request_id]
        self._notes.gave_way(tracked, to_host=to is Residency.HOST, short_blocks=self._short_blocks, now=now)
        if self._admitted.pop(job.request_id, None) is not None:
            self._running = [each for each in self._running if each is not job]
        self.num_preemptions += 1
        if to is Residency.HOST:
            self._move(tracked, to)
        else:
            self._drop_kv(tracked)

    def _drop_kv(self, tracked: Tracked) -> None:
        tracked.drop_kv()
        if tracked.residency is Residency.HOST:
            self._move(tracked, Residency.DEVICE)
        self._note_host(tracked)
        self._dirty = True
        self._preempted_in = self._plan_seq + 1

    def _move(self, tracked: Tracked, residency: Residency) -> None:
        tracked.residency = residency
        tracked.num_moves += 1
        self._note_host(tracked)
        self._dirty = True
        if residency is Residency.HOST:
            self._preempted_in = self._plan_seq + 1

    def _note_host(self, tracked: Tracked) -> None:
        if tracked.blocks_on_host:
            self._hosted[tracked.job.request_id] = tracked
        else:
            self._hosted.pop(tracked.job.request_id, None)

    def _make_way(self, worker: WorkerReady, now: float) -> None:
        """Where somebody waits, sequences that rest give up their KV and their places: their clients do not read."""
        resting = [each.job for each in self._admitted.values() if each.stalled]
        if resting and self._applied_plan_seq >= self._preempted_in and next(self._waiting(now), None) is not None:
            host_free = self._view(worker, self._running).host_free
            for job in reversed(resting):
                fits = 0 < job.computed_len <= host_free and self.kv.swaps
                host_free -= job.computed_len if fits else 0
                self._preempt(job, Residency.HOST if fits else Residency.DEVICE, now)

    def _grants_are_used_up(self) -> bool:
        """Whether a job that is to execute has come near the end of what the latest plan grants it."""
        decode_s = self._decode_s()
        lead = 0 if decode_s is None else math.ceil(self.limits.grant_lead_s / decode_s)
        return any(
            job.known_len + lead >= each.granted_len < each.max_total_len
            for job in self._running
            for each in (self._tracked[job.request_id],)
        )

    def _plan(self, worker: WorkerReady) -> Plan:
        self._plan_seq += 1
        decode_s = self._decode_s()
        # All of them take part in the next step, so no prefill may use up its tokens before the decodes have theirs.
        running = [self._tracked[job.request_id] for job in sorted(self._running, key=lambda job: not job.decodes)]
        taken = set(self._sent)
        slots = [self._slot(each, decode_s, standby=False) for each in running]
        slots += [self._slot(each, decode_s, standby=False) for rid, each in self._admitted.items() if rid not in taken]
        slots += [self._slot(self._tracked[rid], decode_s, standby=True) for rid in self._standby]
        named = {slot.request_id for slot in slots}
        # Shipped earlier and pushed out of the standby window by preempted ones: still the worker's to keep.
        slots += [
            self._slot(each, decode_s, standby=True)
            for rid, each in self._tracked.items()
            if rid not in named and each.shipped_in is not None
        ]
        return Plan(
            worker_incarnation=worker.worker_incarnation,
            lease=self._lease,
            plan_seq=self._plan_seq,
            as_of_report_seq=self._report_seq,
            reserve_blocks=self._reserve_blocks(worker),
            slots=tuple(slots),
        )

    def _reserve_blocks(self, worker: WorkerReady) -> int:
        """Where KV can be made to leave, room for growth is made when it is needed."""
        size = worker.block_size
        return 0 if self.kv.evicts else -(-self.admission.reserve(worker.num_blocks * size) // size)

    def _slot(self, tracked: Tracked, decode_s: float | None, *, standby: bool) -> Slot:
        if tracked.shipped_in is None:
            tracked.shipped_in = self._plan_seq
            self._undelivered[tracked.job.request_id] = tracked
        tracked.granted_len = self._grant(tracked, decode_s)
        return Slot(
            request_id=tracked.request.request_id,
            attempt=tracked.request.attempt,
            prefill_to=tracked.max_total_len,
            length_to=tracked.granted_len,
            standby=standby,
            num_preemptions=tracked.num_preemptions,
            request=None if tracked.delivered else tracked.request,
            residency=tracked.residency,
            num_moves=tracked.num_moves,
        )

    def _decode_s(self) -> float | None:
        """Seconds of a step of all that are to execute; None before anything has been measured."""
        if self._cost is None:
            return None
        return self._cost.step_s(0, max(1, len(self._running)), sum(job.known_len for job in self._running))

    def _grant(self, tracked: Tracked, decode_s: float | None) -> int:
        """Total length up to which it may go on before the order looks at it again; its next step at least.

        Where nobody else wants its place there is nothing to look at: whoever comes brings a new plan.
        """
        if decode_s is None or self._cost is None or not self._contended:
            return tracked.max_total_len
        slice_s = max(self.order.slice_s(tracked.job), 2 * self.limits.grant_lead_s)
        if slice_s == math.inf:
            return tracked.max_total_len
        missing = tracked.job.missing_len
        first_s = 0.0 if missing <= 1 else self._cost.prefill_s(missing, tracked.job.known_len - missing) - decode_s
        num_tokens = max(1, math.ceil((slice_s - first_s) / decode_s))
        return min(tracked.max_total_len, tracked.job.known_len + num_tokens)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless places, lengths and payloads agree."""
        self._notes.journal.check_integrity(set(self._tracked))
        if not self._admitted.keys() <= self._tracked.keys():
            raise IntegrityError(f"admitted {set(self._admitted)} are not all known: {set(self._tracked)}")
        if not {job.request_id for job in self._running} <= self._admitted.keys():
            raise IntegrityError("a request that is not admitted is to execute")
        for request_id, tracked in self._tracked.items():
            if tracked.delivered and tracked.shipped_in is None:
                raise IntegrityError(f"{request_id}: delivered but never shipped")
            if tracked.job.known_len > tracked.max_total_len:
                raise IntegrityError(f"{request_id}: longer than it may be")
            if (tracked.blocks_on_host > 0) != (request_id in self._hosted):
                raise IntegrityError(f"{request_id}: on the host and not known to be, or the other way round")
