"""Proactive offload and upload by estimated next scheduled time (FastServe, section 4.2).

The job that is scheduled last leaves the device first, ahead of need: newcomers find idle slots and no job waits for a
copy.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from farsight.core.decisions import Facts
from farsight.core.errors import InvalidValueError
from farsight.policies.interfaces import KV_POLICIES, Job, KvMoves, KvPolicy, KvView, ReplicaContext
from farsight.policies.order.skip_join_mlfq import Group, SkipJoinMlfq, Urgency

_Turn = tuple[Urgency, float, int, float]

MIN_HOST_SHARE = 0.1
"""Share of the host memory that no starting job may fill: returning and growing jobs change places there. FastServe's
artifact keeps the same share, and lets any number of jobs start while more than that is free (ADR 83)."""


def enst_s(order: SkipJoinMlfq, jobs: Iterable[Job], now: float) -> dict[str, float]:
    """Returns the estimated next scheduled time of each job, in seconds from now, by request id.

    Section 4.2: T_exec(i, j) is the sum of the quanta from j's level down to the level just above i's, T_exec(i) its
    sum over all j strictly higher than i, and ENST(i) = min(T_promote(i), T_exec(i)), T_promote(i) = limit - waited(i).
    Between jobs of unequal urgency: a more urgent j is higher at any level and takes a quantum of its own at least; a
    promotion does not pass j, so j's time is added to the minimum instead of being one side of it.

    O(q + m L) for m jobs, q queues that are not empty and L levels: cumulative sums instead of pairs.
    """
    return {job.request_id: time_s for (_, time_s, _, _), job in _keyed(order, jobs, now)}


def _keyed(order: SkipJoinMlfq, jobs: Iterable[Job], now: float) -> list[tuple[_Turn, Job]]:
    """Returns each job with (urgency, ENST in seconds, level, minus its arrival); queue by queue, the highest first."""
    by_group: dict[Group, list[tuple[Job, float]]] = {}
    for job, group, waits_since in order.standing(jobs):
        by_group.setdefault(group, []).append((job, waits_since))
    ahead = _Ahead(order)
    sizes = order.groups()
    entry = next(sizes, None)
    starve_limit_s = order.config.starve_limit_s
    keyed: list[tuple[_Turn, Job]] = []
    for group in sorted(by_group):
        while entry is not None and entry[0] < group:
            ahead.add(*entry)
            entry = next(sizes, None)
        urgent_s, own_s = ahead.times_s(group)
        urgency, level = group
        for job, waits_since in by_group[group]:
            promote_s = max(0.0, starve_limit_s - (now - waits_since))
            time_s = urgent_s + (promote_s if promote_s < own_s else own_s)
            keyed.append(((urgency, time_s, level, -job.arrived_at), job))
    return keyed


class _Ahead:
    """Jobs in the queues passed so far, as sums."""

    def __init__(self, order: SkipJoinMlfq) -> None:
        self._order = order
        self._urgency: Urgency | None = None
        self._own: Counter[int] = Counter()
        self._own_num = 0
        self._own_above_s = 0.0
        self._more_urgent: Counter[int] = Counter()

    def add(self, group: Group, num_jobs: int) -> None:
        urgency, level = group
        self._enter(urgency)
        self._own[level] += num_jobs
        self._own_num += num_jobs
        self._own_above_s += num_jobs * self._order.above_s(level)

    def times_s(self, group: Group) -> tuple[float, float]:
        """Returns T_exec of a job of this queue in seconds: the shares of more urgent and of equally urgent jobs."""
        urgency, level = group
        self._enter(urgency)
        above_s = self._order.above_s(level)
        urgent_s = 0.0
        for other, num_jobs in self._more_urgent.items():
            down_s = above_s - self._order.above_s(other)
            urgent_s += num_jobs * max(down_s, self._order.quantum_s(other))
        return urgent_s, self._own_num * above_s - self._own_above_s

    def _enter(self, urgency: Urgency) -> None:
        if urgency != self._urgency:
            self._more_urgent.update(self._own)
            self._own.clear()
            self._own_num, self._own_above_s = 0, 0.0
            self._urgency = urgency


def by_enst(order: SkipJoinMlfq, jobs: Sequence[Job], now: float, found: dict[str, float] | None = None) -> list[Job]:
    """Returns the jobs in their order of return: most urgent first, then by ENST; O(m log m) beyond ``enst_s``.

    At equal ENST, jobs of a lower level and then older jobs come last, and so are offloaded first.

    Args:
        found: Receives the times in seconds, by request id.
    """
    keyed = _keyed(order, jobs, now)
    if found is not None:
        found.update((job.request_id, time_s) for (_, time_s, _, _), job in keyed)
    keyed.sort(key=itemgetter(0))
    return [job for _, job in keyed]


def first_by_enst(order: SkipJoinMlfq, jobs: Sequence[Job], num: int, now: float) -> list[Job]:
    """Returns the first ``num`` of ``by_enst``; O(m + num log m) beyond the times."""
    return [job for _, job in heapq.nsmallest(num, _keyed(order, jobs, now), key=itemgetter(0))]


class Room:
    """Makes room, one victim after another.

    Attributes:
        short: Tokens still to be freed; negative if more than enough are free.
        moves: Jobs that have to leave so far.
    """

    def __init__(self, short: int, host_free: int) -> None:
        self.short = short
        self._host_free = host_free
        self._offload: list[Job] = []
        self._drop: list[Job] = []
        self._taken: set[str] = set()

    @property
    def moves(self) -> KvMoves:
        return KvMoves(tuple(self._offload), tuple(self._drop))

    def take(self, victims: Iterable[Job], *, may_drop: bool) -> None:
        """Takes victims until enough is free; a victim that the host cannot hold is dropped if allowed, or skipped."""
        for job in victims:
            if self.short <= 0:
                return
            fits_host = job.computed_len <= self._host_free
            if not job.is_resident or job.request_id in self._taken or not (fits_host or may_drop):
                continue
            (self._offload if fits_host else self._drop).append(job)
            self._host_free -= job.computed_len if fits_host else 0
            self._taken.add(job.request_id)
            self.short -= job.computed_len


def make_room(view: KvView, victims: Sequence[Job], *, swaps: bool) -> Room:
    """Frees just the memory that the running jobs lack: of the victims first, then of running jobs from the last.

    The first running job is never taken: it always fits alone, so the system as a whole makes progress.

    Args:
        victims: Jobs that are not to execute next, the first to leave first.
        swaps: Whether victims keep their KV on the host while there is room.
    """
    room = Room(view.needed - view.free, view.host_free if swaps else 0)
    room.take(victims, may_drop=True)
    room.take(reversed(view.running[1:]), may_drop=True)
    return room


@dataclass(frozen=True, slots=True)
class EnstOffload(KvPolicy):
    """A ``KvPolicy`` that keeps slots idle for newcomers. O(q + m L + m log m) for m jobs with KV that do not run.

    The paper's slots all have one size; here a slot is the mean of the known tokens of the running jobs (of all with
    KV on the device while none runs), the best guess of what a newcomer will hold.

    Attributes:
        order: Gives levels, quanta and waiting times.
        min_idle_slots: K. The paper gives no number and finds none that matters; the artifact keeps as many blocks of
            16 tokens as its batch has jobs, about one slot.
        num_burst_levels: K': as many slots are kept as jobs are in the K' highest levels, if that is more than K.
        lookahead: Most jobs that are uploaded at one scheduling point (artifact: its batch size).
        evicts, swaps: As in ``KvPolicy``.

    Raises:
        InvalidValueError: a negative number.
    """

    order: SkipJoinMlfq
    min_idle_slots: int = 1
    num_burst_levels: int = 2
    lookahead: int = 16
    evicts: bool = True
    swaps: bool = True
    _times: dict[str, float] = field(default_factory=dict, init=False, repr=False, compare=False)  # of the last moves

    def __post_init__(self) -> None:
        for name in ("min_idle_slots", "num_burst_levels", "lookahead"):
            if getattr(self, name) < 0:
                raise InvalidValueError(name, getattr(self, name), "0 or more")

    def idle_target(self, view: KvView) -> int:
        """Returns the device tokens to keep free: max(K, jobs in the top K' levels) slots."""
        holders = view.running or view.idle
        if not holders:
            return 0
        slot = sum(job.known_len for job in holders) / len(holders)
        return math.ceil(slot * max(self.min_idle_slots, self.order.num_in_top(self.num_burst_levels)))

    def is_due(self, view: KvView) -> bool:
        """Returns whether the running jobs or the idle target lack room, or there is room for KV on the host."""
        spare = view.free - view.needed - self.idle_target(view)
        return spare < 0 or (bool(view.offloaded) and spare >= view.block_size)

    def moves(self, view: KvView, now: float) -> KvMoves:
        """Makes room for the running jobs, then for the idle target; uploads KV only if no job has to leave."""
        self._times.clear()
        target = self.idle_target(view)
        is_short = view.needed + target > view.free
        victims = by_enst(self.order, view.idle, now, self._times)[::-1] if is_short and view.idle else []
        room = make_room(view, victims, swaps=self.swaps)
        room.short += target
        room.take(victims, may_drop=False)
        if room.moves != KvMoves():
            return room.moves
        return KvMoves(upload=self._uploads(view, -room.short, now))

    def explain(self, job: Job, now: float) -> Facts:
        """Returns the job's ENST as the latest ``moves`` compared it; computed now if it was not compared."""
        known = self._times.get(job.request_id)
        return {"enst_s": enst_s(self.order, [job], now)[job.request_id] if known is None else known}

    def start_room(self, view: KvView) -> float:
        return view.start_room(MIN_HOST_SHARE)

    def _uploads(self, view: KvView, spare: int, now: float) -> tuple[Job, ...]:
        """Returns jobs in ascending ENST while the idle target stays free; the next point would offload any more."""
        uploads: list[Job] = []
        if spare < view.block_size:
            return ()
        for job in first_by_enst(self.order, view.offloaded, self.lookahead, now):
            spare -= -(-job.known_len // view.block_size) * view.block_size
            if spare < 0:
                break
            uploads.append(job)
        return tuple(uploads)


@KV_POLICIES.register("enst-proactive", needs="skip-join-mlfq", swaps=True)
def build_enst_proactive(context: ReplicaContext) -> EnstOffload:
    """Moves KV out and back ahead of need, by the estimated next scheduled time."""
    config = context.settings.scheduler
    return EnstOffload(context.order_as(SkipJoinMlfq), config.min_idle_slots, config.num_burst_levels)
