"""Whose turn it is on a replica: who has a place, who of them executes next, and who gives way."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from core.errors import IntegrityError
from core.request import Residency
from policies.interfaces import KvMoves, RanksSome, ReplicaPolicies
from policies.job import Job
from policies.replica.mirror import WorkerMirror
from policies.replica.selection import Selection, Selector
from policies.replica.trace import ReplicaTrace


class StepSelector:
    """Asks the parts at each scheduling point, and books what follows from their answers.

    Args:
        max_num_seqs: As in ``SchedulerLimits``.
        notes: Where reasons are taken down.

    Attributes:
        running: Those of the admitted that are to execute, best first.
        num_preemptions: Ordered so far, of all requests.
    """

    def __init__(self, policies: ReplicaPolicies, max_num_seqs: int, shadow: WorkerMirror, notes: ReplicaTrace) -> None:
        self.order, self.admission, self.kv = policies.order, policies.admission, policies.kv
        self.running: list[Job] = []
        self.num_preemptions = 0
        self._max_num_seqs = max_num_seqs
        self._shadow = shadow
        self._notes = notes

    def decide(self, now: float) -> bool:
        """A scheduling point, while there is a worker; False if all that is here has to go: a batch has no room."""
        shadow = self._shadow
        self.order.refresh(now)
        selection = self._select(now)
        for job in selection.newcomers:
            self._admit(job, now)
        if selection.refused:
            self._notes.refused(selection.refused, now)
        self.running = selection.running
        if shadow.short_blocks > 0 or self.order.preemptive or self.kv.watches:
            moves = self.kv.moves(shadow.view(self.running), now)
            if moves.break_off:
                self.running = []
                return False
            self._carry_out(moves, now)
        if not selection.newcomers:
            self._make_way(now)
        return True

    def waiting(self, now: float) -> Iterator[Job]:
        """Who waits for a place and could use it, best first."""
        admitted, tracked = self._shadow.admitted, self._shadow.tracked
        return (
            job
            for job in self.order.ranked(now)
            if job.request_id not in admitted and not tracked[job.request_id].stalled
        )

    def reserve_blocks(self) -> int:
        """Blocks that the worker's own starts leave free for growth: none where KV can be made to leave for it."""
        worker = self._shadow.worker
        if worker is None or self.kv.evicts:
            return 0
        return -(-self.admission.reserve(worker.num_blocks * worker.block_size) // worker.block_size)

    def _select(self, now: float) -> Selection:
        """Who is to execute next; those that rest are left out."""
        shadow = self._shadow
        admitted = shadow.admitted
        residents: list[Job] = [each for each in admitted.values() if not each.stalled]
        if not self.order.preemptive and (shadow.num_waiting == 0 or (shadow.is_answering and not self.kv.evicts)):
            return Selection(residents)  # the blocks that a preemption frees are for those it was made for
        selector = Selector(
            self.admission,
            self._max_num_seqs,
            shadow.capacity(),
            may_start=lambda: self.kv.may_start(shadow.view(residents)),
        )
        fixed = None if self.kv.evicts else list[Job](admitted.values())
        if self.order.preemptive:
            tracked = shadow.tracked
            ranked = (job for job in self.order.ranked(now) if not tracked[job.request_id].stalled)
            return selector.select(ranked, admitted, fixed, lambda: self._holders(now))
        return selector.select(itertools.chain(residents, self.waiting(now)), admitted, fixed)

    def _holders(self, now: float) -> list[Job]:
        """Those with a place or with KV that do not rest, best first."""
        shadow = self._shadow
        jobs = [each for each in (shadow.admitted | shadow.hosted).values() if not each.stalled]
        if isinstance(self.order, RanksSome):
            return self.order.among(jobs, now)
        wanted = {job.request_id for job in jobs}
        return [job for job in self.order.ranked(now) if job.request_id in wanted]

    def _carry_out(self, moves: KvMoves, now: float) -> None:
        for job in moves.offload:
            self._preempt(job, Residency.HOST, now)
        for job in moves.drop:
            self._preempt(job, Residency.DEVICE, now)
        for job in moves.upload:
            self._admit(job, now, ahead=True)

    def _admit(self, job: Job, now: float, *, ahead: bool = False) -> None:
        shadow = self._shadow
        tracked = shadow.admitted[job.request_id] = shadow.tracked[job.request_id]
        tracked.told = None
        returns = tracked.residency is Residency.HOST
        if returns:
            shadow.move(tracked, Residency.DEVICE)
        self._notes.admitted(tracked, returns=returns, ahead=ahead, now=now)

    def _preempt(self, job: Job, to: Residency, now: float) -> None:
        """It gives up its place; its KV is moved to the host, or dropped wherever it is."""
        shadow = self._shadow
        tracked = shadow.tracked[job.request_id]
        to_host = to is Residency.HOST
        self._notes.gave_way(tracked, to_host=to_host, short_blocks=shadow.short_blocks, now=now)
        if shadow.admitted.pop(job.request_id, None) is not None:
            self.running = [each for each in self.running if each is not job]
        self.num_preemptions += 1
        if to_host:
            shadow.move(tracked, to)
        else:
            shadow.drop_kv(tracked)

    def _make_way(self, now: float) -> None:
        """Where somebody waits, sequences that rest give up their KV and their places: their clients do not read."""
        shadow = self._shadow
        resting = [each for each in shadow.admitted.values() if each.stalled]
        if resting and shadow.preemption_is_known and next(self.waiting(now), None) is not None:
            host_free = shadow.view(self.running).host_free
            for job in reversed(resting):
                fits = 0 < job.computed_len <= host_free and self.kv.swaps
                host_free -= job.computed_len if fits else 0
                self._preempt(job, Residency.HOST if fits else Residency.DEVICE, now)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless those that are to execute have places."""
        if not {job.request_id for job in self.running} <= self._shadow.admitted.keys():
            raise IntegrityError("a request that is not admitted is to execute")
