"""Whose turn it is on a replica: who has a place, who of them executes next, and who gives way."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from dataclasses import dataclass, field

from core.errors import IntegrityError
from core.request import Residency
from policies.interfaces import Admission, Job, KvMoves, RanksSome, ReplicaPolicies
from policies.replica.facts import Admitted, Evicted, Fact, NotAdmitted
from policies.replica.mirror import WorkerMirror
from policies.tenancy.fair_shares import FairShares


@dataclass(slots=True)
class Selection:
    """Jobs to execute next, best first, and those of them that were not admitted before.

    Attributes:
        refused: Whom admission has said no to.
    """

    running: list[Job] = field(default_factory=list)
    newcomers: list[Job] = field(default_factory=list)
    refused: list[Job] = field(default_factory=list)


@dataclass(slots=True)
class Selector:
    """Walks jobs in rank order and takes those that have room; tokens.

    An admitted job goes on while what is taken fits the pool as it is now. Any other needs the admission's consent;
    after more than ``admission.max_skips`` refusals the walk ends, so that nobody is overtaken by all others.

    Attributes:
        max_num_seqs: Jobs that may execute.
        capacity: KV tokens that they may hold.
        may_start: Whether a job without KV may start at all.
    """

    admission: Admission
    max_num_seqs: int
    capacity: int
    may_start: Callable[[], bool]
    _used: int = 0
    _untold: list[Job] | None = None
    _starts_allowed: bool | None = None

    def select(
        self,
        ranked: Iterable[Job],
        admitted: Collection[str],
        fixed: Collection[Job] | None = None,
        holders: Callable[[], Iterable[Job]] = tuple,
    ) -> Selection:
        """Walks the jobs.

        Args:
            ranked: Those that want to execute, best first, read as far as needed.
            admitted: Ids of those that have their place already.
            fixed: Jobs whose memory nobody can have, whether they are taken or not; None if everybody's can be taken.
            holders: Those of ``ranked`` that are admitted or have KV, best first: where no job without KV may start,
                the walk goes on with these alone, so that it does not pass by all that wait.
        """
        selection = Selection()
        self._untold = []
        if fixed is not None:
            self.admission.begin(list(fixed), self.capacity)
            self._untold = None
        may_move = fixed is None
        walk = iter(ranked)
        passed = set()
        for job in walk:
            if len(selection.running) >= self.max_num_seqs:
                return selection
            if job.request_id in admitted:  # most of those that the walk reads
                passed.add(job.request_id)
                if not may_move or self._keeps(job):
                    selection.running.append(job)
                continue
            if self._is_barred(job, admitted):
                break
            passed.add(job.request_id)
            if not self._consider(job, selection, admitted, may_move):
                return selection
        else:
            return selection
        last = self._consider_holders(holders(), passed, selection, admitted, may_move)
        if not selection.running:  # those that the host holds do not want to run
            barred = [job, *self._barred_before(last, walk, admitted)]
            selection.newcomers = [each for each in barred if self._admits(each)]
            selection.running = list(selection.newcomers)
        return selection

    def _is_barred(self, job: Job, admitted: Collection[str]) -> bool:
        """Those that the host holds come before those without KV, or it stays full for ever."""
        return not (job.computed_len or job.host_len or job.request_id in admitted or self._may_start())

    def _consider(self, job: Job, selection: Selection, admitted: Collection[str], may_move: bool) -> bool:
        """Takes the job if it has room; False if the walk ends with it."""
        if job.request_id in admitted:
            if not may_move or self._keeps(job):
                selection.running.append(job)
        elif self._admits(job):
            selection.running.append(job)
            selection.newcomers.append(job)
        else:
            selection.refused.append(job)
            return len(selection.refused) <= self.admission.max_skips
        return True

    def _consider_holders(
        self, holders: Iterable[Job], passed: set[str], selection: Selection, admitted: Collection[str], may_move: bool
    ) -> Job | None:
        """Goes on with those that have KV; the job that the walk ends with, if it does."""
        for job in holders:
            if job.request_id in passed or self._is_barred(job, admitted):
                continue
            if len(selection.running) >= self.max_num_seqs:
                break
            if not self._consider(job, selection, admitted, may_move):
                return job
        return None

    def _barred_before(self, last: Job | None, walk: Iterator[Job], admitted: Collection[str]) -> Iterator[Job]:
        """Those that the walk has left out, but for the first of them, as many as there are places."""
        before = itertools.takewhile(lambda job: job is not last, walk)
        barred = (job for job in before if self._is_barred(job, admitted))
        return itertools.islice(barred, self.max_num_seqs - 1)

    def _may_start(self) -> bool:
        if self._starts_allowed is None:
            self._starts_allowed = self.may_start()
        return self._starts_allowed

    def _keeps(self, job: Job) -> bool:
        """Those admitted jobs that may be moved out stay that fit with one token more each."""
        used = self._used + job.prompt_len + job.output_len + 1
        if used > self.capacity and self._used:
            return False
        self._used = used
        if self._untold is None:
            self.admission.add(job)
        else:
            self._untold.append(job)
        return True

    def _admits(self, job: Job) -> bool:
        if self._untold is not None:
            self.admission.begin(self._untold, self.capacity)
            self._untold = None
        if not self.admission.admits(job):
            return False
        self.admission.add(job)
        self._used += job.known_len + 1
        return True


class StepSelector:
    """Asks the parts at each scheduling point, and books what follows from their answers.

    Args:
        max_num_seqs: As in ``SchedulerLimits``.
        shares: Puts what the order ranks into the order of the tenants' turns.

    Attributes:
        running: Those of the admitted that are to execute, best first.
        num_preemptions: Ordered so far, of all requests.
    """

    def __init__(self, policies: ReplicaPolicies, max_num_seqs: int, mirror: WorkerMirror, shares: FairShares) -> None:
        self.order, self.admission, self.kv = policies.order, policies.admission, policies.kv
        self.running: list[Job] = []
        self.num_preemptions = 0
        self._max_num_seqs = max_num_seqs
        self._mirror = mirror
        self._shares = shares

    def choose(self, now: float) -> Generator[Fact, None, bool]:
        """A scheduling point, while there is a worker; False if all that is here has to go: a batch has no room."""
        mirror = self._mirror
        self.order.refresh(now)
        selection = self._select(now)
        for job in selection.newcomers:
            yield self._admit(job)
        if selection.refused:
            yield NotAdmitted(selection.refused)
        self.running = selection.running
        if mirror.short_blocks > 0 or self.order.preemptive or self.kv.watches:
            moves = self.kv.moves(mirror.view(self.running), now)
            if moves.break_off:
                self.running = []
                return False
            yield from self._carry_out(moves)
        if not selection.newcomers:
            yield from self._make_way(now)
        return True

    def waiting(self, now: float) -> Iterator[Job]:
        """Who waits for a place and could use it, best first."""
        admitted, scheduled = self._mirror.admitted, self._mirror.requests

        def waits(job: Job) -> bool:
            return job.request_id not in admitted and not scheduled[job.request_id].stalled

        return self._shares.ranked(self.order, now, waits, admitted.values())

    def reserve_blocks(self) -> int:
        """Blocks that the worker's own starts leave free for growth: none where KV can be made to leave for it."""
        worker = self._mirror.worker
        if worker is None or self.kv.evicts:
            return 0
        return -(-self.admission.reserve(worker.num_blocks * worker.block_size) // worker.block_size)

    def _select(self, now: float) -> Selection:
        """Who is to execute next; those that rest are left out."""
        mirror = self._mirror
        admitted = mirror.admitted
        residents: list[Job] = [each for each in admitted.values() if not each.stalled]
        if mirror.short_blocks > 0:  # the last of them lose their KV: those of the tenant that is furthest ahead
            residents = self._shares.arranged(residents)
        if not self.order.preemptive and (mirror.num_waiting == 0 or (mirror.is_answering and not self.kv.evicts)):
            return Selection(residents)  # the blocks that a preemption frees are for those it was made for
        selector = Selector(
            self.admission,
            self._max_num_seqs,
            mirror.capacity(),
            may_start=lambda: self.kv.may_start(mirror.view(residents)),
        )
        fixed = None if self.kv.evicts else list[Job](admitted.values())
        if self.order.preemptive:
            scheduled = mirror.requests
            ranked = self._shares.ranked(self.order, now, lambda job: not scheduled[job.request_id].stalled)
            return selector.select(ranked, admitted, fixed, lambda: self._holders(now))
        return selector.select(itertools.chain(residents, self.waiting(now)), admitted, fixed)

    def _holders(self, now: float) -> list[Job]:
        """Those with a place or with KV that do not rest, best first."""
        mirror = self._mirror
        jobs = [each for each in (mirror.admitted | mirror.hosted).values() if not each.stalled]
        if isinstance(self.order, RanksSome):
            return self._shares.arranged(self.order.among(jobs, now))
        wanted = {job.request_id for job in jobs}
        return list(self._shares.ranked(self.order, now, lambda job: job.request_id in wanted))

    def _carry_out(self, moves: KvMoves) -> Iterator[Fact]:
        for job in moves.offload:
            yield from self._preempt(job, Residency.HOST)
        for job in moves.drop:
            yield from self._preempt(job, Residency.DEVICE)
        for job in moves.upload:
            yield self._admit(job, ahead=True)

    def _admit(self, job: Job, *, ahead: bool = False) -> Admitted:
        mirror = self._mirror
        scheduled = mirror.admitted[job.request_id] = mirror.requests[job.request_id]
        scheduled.told = None
        returns = scheduled.residency is Residency.HOST
        if returns:
            mirror.move(scheduled, Residency.DEVICE)
        return Admitted(scheduled, returns, ahead)

    def _preempt(self, job: Job, to: Residency) -> Iterator[Fact]:
        """It gives up its place; its KV is moved to the host, or dropped wherever it is."""
        mirror = self._mirror
        scheduled = mirror.requests[job.request_id]
        to_host = to is Residency.HOST
        yield Evicted(scheduled, to_host, mirror.short_blocks)
        if mirror.admitted.pop(job.request_id, None) is not None:
            self.running = [each for each in self.running if each is not job]
        self.num_preemptions += 1
        if to_host:
            mirror.move(scheduled, to)
        else:
            mirror.drop_kv(scheduled)

    def _make_way(self, now: float) -> Iterator[Fact]:
        """Where somebody waits, sequences that rest give up their KV and their places: their clients do not read."""
        mirror = self._mirror
        resting = [each for each in mirror.admitted.values() if each.stalled]
        if resting and mirror.preemption_is_known and next(self.waiting(now), None) is not None:
            host_free = mirror.view(self.running).host_free
            for job in reversed(resting):
                fits = 0 < job.computed_len <= host_free and self.kv.swaps
                host_free -= job.computed_len if fits else 0
                yield from self._preempt(job, Residency.HOST if fits else Residency.DEVICE)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless those that are to execute have places."""
        if not {job.request_id for job in self.running} <= self._mirror.admitted.keys():
            raise IntegrityError("a request that is not admitted is to execute")
