"""The scheduler of one model replica: a state machine, ``handle(event, now) -> [Instruction]``.

It keeps a shadow of the worker's state from step reports (the worker is the truth) and answers with plans. Each
plan is a full snapshot: the admitted requests in rank order, then the standbys that may take the place of whoever
ends before the next plan comes (design section 3, rules 1-5).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from core.errors import IntegrityError
from core.messages import FinishedSequence, Key, Plan, Slot, SlotProgress, StepReport, WorkerReady, WorkerState
from core.request import Request, Residency
from policies.fcfs import FcfsQueue
from policies.recompute import choose_victims
from policies.watermark import WatermarkAdmission

NUM_REMEMBERED = 4096
"""Ended requests that a Scheduler still knows when asked: the last tokens may be on their way to the ingress."""


@dataclass(frozen=True, slots=True)
class WorkerConnected:
    """A worker has granted a lease: a new one that holds nothing, or one that outlived another Scheduler."""

    state: WorkerState


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The worker is gone, and everything shipped to it; their ingress replicas resume them elsewhere."""


@dataclass(frozen=True, slots=True)
class RequestsArrived:
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class RequestsAborted:
    """The clients of these (request id, attempt) pairs are gone."""

    keys: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class WorkerReported:
    report: StepReport


@dataclass(frozen=True, slots=True)
class ResidencyOrdered:
    """The KV offload manager wants the KV of these there; what is on the host waits until it is called back."""

    orders: tuple[tuple[Key, Residency], ...]


Event = WorkerConnected | WorkerLost | RequestsArrived | RequestsAborted | WorkerReported | ResidencyOrdered


@dataclass(frozen=True, slots=True)
class SendPlan:
    """Send this to the worker; a newer one supersedes it."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class RefuseRequest:
    """Tell the ingress that this request will never run."""

    request_id: str
    attempt: int
    field: str
    message: str


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """A request reached its end in the worker; said once."""

    finished: FinishedSequence
    arrived_at: float
    ended_at: float


Instruction = SendPlan | RefuseRequest | RequestEnded


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds on what a plan holds.

    Attributes:
        max_num_seqs: Admitted requests at most; the worker's own bound of a step.
        standby_slots: Requests shipped ahead so that a place never stays empty for a round trip.
    """

    max_num_seqs: int
    standby_slots: int


@dataclass(slots=True)
class _Tracked:
    """The scheduler's shadow of one request; lengths in tokens, as last reported."""

    request: Request
    arrived_at: float
    output_len: int = 0
    num_blocks: int = 0
    num_preemptions: int = 0
    shipped_in: int | None = None  # first plan of this lease that carried the payload
    delivered: bool = False  # the worker has the payload
    stalled: bool = False  # its client does not read
    residency: Residency = Residency.DEVICE
    num_moves: int = 0
    num_host_blocks: int = 0
    kept_off: bool = False  # it is on the host by order and is not called back for want of anything better

    @property
    def rests(self) -> bool:
        return self.stalled or self.kept_off

    @property
    def is_leaving(self) -> bool:
        """Ordered to the host, and its blocks are not free yet."""
        return self.residency is Residency.HOST and self.num_blocks > 0

    @property
    def num_tokens(self) -> int:
        return self.request.prompt_len + self.output_len


class ReplicaScheduler:
    """Orders, admits and preempts the requests of one replica.

    Args:
        admission: Decides whether the next request may start.
        limits: Bounds of a plan.
        offloads: Whether who must give up its place keeps its KV on the host while there is room.
    """

    def __init__(self, admission: WatermarkAdmission, limits: SchedulerLimits, *, offloads: bool = False) -> None:
        self._offloads = offloads
        self.admission = admission
        self.limits = limits
        self._tracked: dict[str, _Tracked] = {}
        self._waiting = FcfsQueue()
        self._admitted: dict[str, None] = {}  # in order of admission
        self._standby: tuple[str, ...] = ()
        self._recent: dict[Key, None] = {}  # ended lately, oldest first
        self._worker: WorkerReady | None = None
        self._lease = 0
        self._plan_seq = 0
        self._report_seq = 0
        self._applied_plan_seq = 0  # the worker's plan in force at the last report
        self._shared_blocks = 0  # as last reported
        self._preempted_in = 0  # plan that carries the latest preemption: older pressure is already answered
        self._dirty = False
        self.num_preemptions = 0  # ordered so far, of all requests

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_admitted(self) -> int:
        return len(self._admitted)

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
                out += self._arrive(event.requests, now)
            case RequestsAborted():
                self._abort(event.keys)
            case WorkerReported():
                out += self._take_report(event.report, now)
            case WorkerConnected():
                out += self._connect(event.state, now)
            case WorkerLost():
                self._lose_worker()
            case ResidencyOrdered():
                for key, residency in event.orders:
                    self._order(key, residency)
        out += self._replan()
        return out

    def _arrive(self, requests: tuple[Request, ...], now: float) -> list[Instruction]:
        refused: list[Instruction] = []
        for request in requests:
            known = self._tracked.get(request.request_id)
            if known is not None and known.request.attempt >= request.attempt:
                continue  # a duplicate delivery
            if (request.request_id, request.attempt) in self._recent:
                continue  # one that comes after the end
            if known is not None:
                self._forget(request.request_id)
            problem = self._never_fits(request)
            if problem is not None:
                refused.append(problem)
                continue
            self._track(request, now)
        return refused

    def _track(self, request: Request, now: float) -> _Tracked:
        tracked = _Tracked(request, arrived_at=now, output_len=len(request.output_ids))
        self._tracked[request.request_id] = tracked
        self._waiting.push(request.request_id)
        return tracked

    def _never_fits(self, request: Request) -> RefuseRequest | None:
        if self._worker is None or request.max_total_len <= self._worker.max_model_len:
            return None
        limit = self._worker.max_model_len
        message = f"prompt and max_tokens make {request.max_total_len} tokens, the worker holds at most {limit}"
        return RefuseRequest(request.request_id, request.attempt, "max_tokens", message)

    def _abort(self, keys: tuple[tuple[str, int], ...]) -> None:
        for request_id, attempt in keys:
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.request.attempt <= attempt:
                self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        tracked = self._tracked.pop(request_id)
        self._waiting.remove(request_id)
        self._admitted.pop(request_id, None)
        if tracked.shipped_in is not None:
            self._dirty = True  # the worker forgets what a plan no longer names

    def _connect(self, state: WorkerState, now: float) -> list[Instruction]:
        """Takes over what the worker holds, in its order and ahead of what arrived meanwhile; both go on at once."""
        newcomers = [self._tracked[request_id] for request_id in (*self._admitted, *self._waiting)]
        self._lose_worker()
        self._worker, self._lease = state.ready, state.lease
        for request in state.held:
            adopted = self._track(request, now)
            adopted.shipped_in, adopted.delivered = 0, True
        for progress in state.report.progress:
            adopted = self._tracked[progress.request_id]
            adopted.num_preemptions, adopted.num_moves = progress.num_preemptions, progress.num_moves
            adopted.residency = progress.residency
        refused = [out for known in newcomers for out in self._arrive((known.request,), known.arrived_at)]
        self._dirty = True
        return refused + self._take_report(state.report, now)

    def _lose_worker(self) -> None:
        self._worker = None
        self._shared_blocks = 0
        self._plan_seq = self._report_seq = self._applied_plan_seq = self._preempted_in = 0
        self._tracked.clear()
        self._waiting = FcfsQueue()
        self._admitted.clear()
        self._standby = ()

    def _take_report(self, report: StepReport, now: float) -> list[Instruction]:
        worker = self._worker
        if worker is None or report.worker_incarnation != worker.worker_incarnation or report.lease != self._lease:
            return []
        if report.report_seq <= self._report_seq:
            return []
        self._report_seq = report.report_seq
        self._applied_plan_seq = report.plan_seq
        self._shared_blocks = report.shared_blocks
        for progress in report.progress:
            self._take_progress(progress)
        for tracked in self._tracked.values():
            if tracked.shipped_in is not None and report.plan_seq >= tracked.shipped_in:
                tracked.delivered = True
        ended = [out for finished in report.finished for out in self._end(finished, now)]
        if report.short_blocks > 0 and report.plan_seq >= self._preempted_in and not self._blocks_are_coming:
            self._relieve(report.short_blocks)
        return ended

    def _take_progress(self, progress: SlotProgress) -> None:
        tracked = self._tracked.get(progress.request_id)
        if tracked is None or tracked.request.attempt != progress.attempt:
            return
        tracked.output_len = progress.output_len
        tracked.stalled = progress.stalled
        if progress.num_preemptions < tracked.num_preemptions:
            return  # the worker has not dropped its KV yet, but will
        tracked.num_blocks, tracked.num_host_blocks = progress.num_blocks, progress.num_host_blocks
        if progress.num_moves < tracked.num_moves:
            return  # it does not know yet where it is to be
        if tracked.residency is Residency.HOST and progress.residency is Residency.DEVICE:
            self._take_refusal(progress.request_id)
        elif tracked.residency is Residency.HOST:
            return
        elif progress.num_blocks > 0 and progress.request_id not in self._admitted:
            self._admit(progress.request_id)  # a standby that the worker started by itself

    def _take_refusal(self, request_id: str) -> None:
        """There was no room on the host, or nothing to move: its KV is dropped like that of any preempted one."""
        tracked = self._tracked[request_id]
        tracked.residency, tracked.kept_off = Residency.DEVICE, False
        self._drop_kv(tracked)

    def _end(self, finished: FinishedSequence, now: float) -> list[Instruction]:
        self._remember((finished.request_id, finished.attempt))
        tracked = self._tracked.get(finished.request_id)
        if tracked is None or tracked.request.attempt != finished.attempt:
            return []  # reported again before the acknowledgement arrived, or aborted meanwhile
        del self._tracked[finished.request_id]
        self._waiting.remove(finished.request_id)
        self._admitted.pop(finished.request_id, None)
        return [RequestEnded(finished, tracked.arrived_at, now)]

    def _remember(self, key: Key) -> None:
        self._recent[key] = None
        if len(self._recent) > NUM_REMEMBERED:
            del self._recent[next(iter(self._recent))]

    def _relieve(self, short_blocks: int) -> None:
        """Answers pressure: who rests anyway, then the newest, give up their KV and wait again, at the front."""
        by_need = sorted(self._admitted, key=lambda rid: self._tracked[rid].stalled)
        held = [(rid, self._tracked[rid].num_blocks) for rid in by_need]
        for request_id in choose_victims(held, short_blocks):
            self._preempt(request_id)

    def _preempt(self, request_id: str) -> None:
        """It gives up its place; its KV is dropped, or moved to the host."""
        assert self._worker is not None
        tracked = self._tracked[request_id]
        del self._admitted[request_id]
        self._waiting.push_front(request_id)
        self.num_preemptions += 1
        has_kv = tracked.num_blocks + tracked.num_host_blocks > 0
        if self._offloads and self._worker.num_host_blocks > 0 and has_kv:
            self._move(tracked, Residency.HOST)
        else:
            self._drop_kv(tracked)

    def _drop_kv(self, tracked: _Tracked) -> None:
        tracked.num_preemptions += 1
        tracked.num_blocks = 0
        self._dirty = True
        self._preempted_in = self._plan_seq + 1

    def _move(self, tracked: _Tracked, residency: Residency) -> None:
        tracked.residency = residency
        tracked.num_moves += 1
        self._dirty = True
        if residency is Residency.HOST:
            self._preempted_in = self._plan_seq + 1

    @property
    def _blocks_are_coming(self) -> bool:
        """An offload is under way: the pressure is answered when its blocks are free."""
        return any(tracked.is_leaving for tracked in self._tracked.values())

    def _order(self, key: Key, residency: Residency) -> None:
        """Passes an order on; one for whom nothing can be done any more, or nothing is to be done, is ignored."""
        tracked = self._tracked.get(key[0])
        if tracked is None or tracked.request.attempt != key[1] or tracked.residency is residency:
            return
        if residency is Residency.DEVICE:
            tracked.kept_off = False  # it comes when it is admitted
        elif key[0] in self._admitted and tracked.num_blocks > 0:
            del self._admitted[key[0]]
            self._waiting.push_front(key[0])
            tracked.kept_off = True
            self._move(tracked, Residency.HOST)

    def _admit(self, request_id: str) -> None:
        self._waiting.remove(request_id)
        self._admitted[request_id] = None

    def _replan(self) -> list[Instruction]:
        """Admits what may start and makes a plan if it would say something new."""
        if self._worker is None:
            return []
        newly = self._admissible()
        for request_id in newly:
            self._admit(request_id)
            if self._tracked[request_id].residency is Residency.HOST:
                self._move(self._tracked[request_id], Residency.DEVICE)
        if not newly:
            self._make_way()
        standby = self._next_waiting(self.limits.standby_slots)
        if not (self._dirty or newly or standby != self._standby):
            return []
        self._standby = standby
        self._dirty = False
        return [SendPlan(self._plan())]

    def _admissible(self) -> list[str]:
        assert self._worker is not None
        # Blocks in use when all that is admitted runs. Footprints count a shared block for every sharer; what the
        # last report showed to be shared is taken off. Too low a sum, when a sharer has left since, is harmless: the
        # worker starts nothing that does not fit.
        used = max(len(self._admitted), sum(self._footprint(rid) for rid in self._admitted) - self._shared_blocks)
        num_running = sum(not self._tracked[rid].stalled for rid in self._admitted)
        newly: list[str] = []
        if self._applied_plan_seq < self._preempted_in or self._blocks_are_coming:
            return newly  # the blocks that a preemption frees are for those it was made for
        for request_id in self._waiting:
            if self._tracked[request_id].rests:
                continue
            if num_running + len(newly) >= self.limits.max_num_seqs:
                break
            blocks = self._footprint(request_id)
            if not self.admission.admits(used, blocks, self._worker.num_blocks):
                break  # head of line: FCFS lets nobody overtake
            newly.append(request_id)
            used += blocks
        return newly

    def _make_way(self) -> None:
        """Where somebody waits, sequences that rest give up their KV and their places: their clients do not read."""
        resting = [rid for rid in self._admitted if self._tracked[rid].stalled]
        waits = any(not self._tracked[rid].rests for rid in self._waiting)
        if waits and resting and self._applied_plan_seq >= self._preempted_in:
            for request_id in reversed(resting):
                self._preempt(request_id)

    def _footprint(self, request_id: str) -> int:
        """Blocks the request holds, or needs to start, as far as the scheduler knows."""
        assert self._worker is not None
        tracked = self._tracked[request_id]
        return max(tracked.num_blocks, -(-tracked.num_tokens // self._worker.block_size))

    def _next_waiting(self, count: int) -> tuple[str, ...]:
        reading = (request_id for request_id in self._waiting if not self._tracked[request_id].rests)
        return tuple(itertools.islice(reading, count))

    def _plan(self) -> Plan:
        assert self._worker is not None
        self._plan_seq += 1
        slots = [self._slot(rid, standby=False) for rid in self._admitted]
        slots += [self._slot(rid, standby=True) for rid in self._standby]
        named = {slot.request_id for slot in slots}
        # Shipped earlier and pushed out of the standby window by preempted ones: still the worker's to keep.
        slots += [
            self._slot(rid, standby=True)
            for rid in self._waiting
            if rid not in named and self._tracked[rid].shipped_in is not None
        ]
        return Plan(
            worker_incarnation=self._worker.worker_incarnation,
            lease=self._lease,
            plan_seq=self._plan_seq,
            as_of_report_seq=self._report_seq,
            reserve_blocks=self.admission.reserve_blocks(self._worker.num_blocks),
            slots=tuple(slots),
        )

    def _slot(self, request_id: str, *, standby: bool) -> Slot:
        tracked = self._tracked[request_id]
        if tracked.shipped_in is None:
            tracked.shipped_in = self._plan_seq
        total = tracked.request.max_total_len  # FCFS runs a request to its end: one grant for all of it
        return Slot(
            request_id=request_id,
            attempt=tracked.request.attempt,
            prefill_to=total,
            length_to=total,
            standby=standby,
            num_preemptions=tracked.num_preemptions,
            request=None if tracked.delivered else tracked.request,
            residency=tracked.residency,
            num_moves=tracked.num_moves,
        )

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every request is either waiting or admitted, within the limits."""
        waiting, admitted = set(self._waiting), set(self._admitted)
        if waiting & admitted or waiting | admitted != set(self._tracked):
            raise IntegrityError(f"waiting {waiting} and admitted {admitted} do not split {set(self._tracked)}")
        if len(self._waiting) != len(waiting):
            raise IntegrityError("a request waits twice")
        for request_id, tracked in self._tracked.items():
            if tracked.delivered and tracked.shipped_in is None:
                raise IntegrityError(f"{request_id}: delivered but never shipped")
            if tracked.num_tokens > tracked.request.max_total_len:
                raise IntegrityError(f"{request_id}: longer than it may be")
