"""Decides whose turn it is on a replica: which requests have a place, which of them execute next, which give way."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from farsight.core.decisions import Facts
from farsight.core.errors import IntegrityError
from farsight.core.messages.kv import OffloadOrders, OffloadQuestion
from farsight.core.request import Residency
from farsight.policies.interfaces import Admission, Job, KvMoves, KvView, RanksSome, ReplicaPolicies, ScheduledRequest
from farsight.policies.order.offload_orders import ask
from farsight.policies.replica.facts import Admitted, Evicted, Fact, NotAdmitted
from farsight.policies.replica.mirror import WorkerMirror
from farsight.policies.replica.order_check import OffloadClient, standing_orders
from farsight.policies.replica.places import (
    PlaceLimit,
    all_stream,
    due_first,
    next_blocks,
    step_aside,
    with_room,
)
from farsight.policies.tenancy.fair_shares import FairShares


@dataclass(slots=True)
class Selection:
    """Jobs to execute next, best first, and those of them that were not admitted before.

    Attributes:
        refused: Jobs that admission has refused.
        displaced: Flex jobs whose KV is in the way of others.
    """

    running: list[Job] = field(default_factory=list)
    newcomers: list[Job] = field(default_factory=list)
    refused: list[Job] = field(default_factory=list)
    displaced: list[ScheduledRequest] = field(default_factory=list)


@dataclass(slots=True)
class Selector:
    """Walks jobs in rank order and takes those that have room; sizes are in tokens.

    An admitted job goes on while all taken jobs fit the pool as it is now. Any other job needs the admission's consent;
    the walk ends with the first refusal, so that no job of lower rank overtakes.

    Attributes:
        max_num_seqs: Jobs that may execute.
        capacity: KV tokens that they may hold.
        start_room: Tokens with which jobs without KV may start, in sum; 0 if none may.
    """

    admission: Admission
    max_num_seqs: int
    capacity: int
    start_room: Callable[[], float]
    _used: int = 0
    _untold: list[Job] | None = None
    _start_room: float | None = None

    def select(
        self,
        ranked: Iterable[Job],
        admitted: Collection[str],
        fixed: Collection[Job] | None = None,
        holders: Callable[[], Iterable[Job]] = tuple,
    ) -> Selection:
        """Walks the jobs.

        Args:
            ranked: Jobs that want to execute, best first, read as far as needed.
            admitted: Ids of jobs that have their place already.
            fixed: Jobs whose memory cannot be taken, whether they are selected or not; None if all memory can be taken.
            holders: Jobs of ``ranked`` that are admitted or have KV, best first: where no job without KV may start,
                the walk goes on with these alone, so that it does not pass all waiting jobs.
        """
        selection = Selection()
        self._untold = []
        if fixed is not None:
            self.admission.begin(list(fixed), self.capacity)
            self._untold = None
        may_move = fixed is None
        walk, running = iter(ranked), selection.running
        left_out = []
        for job in walk:
            if len(running) >= self.max_num_seqs:
                return selection
            if job.request_id in admitted:  # most jobs that the walk reads
                if not may_move or self._keeps(job):
                    running.append(job)
                else:
                    left_out.append(job)
                continue
            if self._is_barred(job, admitted):
                break
            if not self._consider(job, selection, admitted, may_move):
                return selection
        else:
            return selection
        passed = {each.request_id for each in (*running, *selection.refused, *left_out)}
        last = self._consider_holders(holders(), passed, selection, admitted, may_move)
        if not selection.running:  # jobs with KV on the host do not want to run
            barred = [job, *self._barred_before(last, walk, admitted)]
            selection.newcomers = [each for each in barred if self._admits(each)]
            selection.running = list(selection.newcomers)
        return selection

    def _is_barred(self, job: Job, admitted: Collection[str]) -> bool:
        """Returns whether a job without KV must wait for jobs with KV on the host, which else stays full for ever."""
        if job.computed_len or job.host_len or job.request_id in admitted:
            return False
        return job.known_len > self._room_to_start()

    def _consider(self, job: Job, selection: Selection, admitted: Collection[str], may_move: bool) -> bool:
        """Takes the job if it has room; returns False if the walk ends with this job."""
        if job.request_id in admitted:
            if not may_move or self._keeps(job):
                selection.running.append(job)
        elif self._admits(job):
            selection.running.append(job)
            selection.newcomers.append(job)
        else:
            selection.refused.append(job)
            return False
        return True

    def _consider_holders(
        self, holders: Iterable[Job], passed: set[str], selection: Selection, admitted: Collection[str], may_move: bool
    ) -> Job | None:
        """Continues the walk with jobs that have KV; returns the job whose refusal ends it, if any."""
        for job in holders:
            if job.request_id in passed or self._is_barred(job, admitted):
                continue
            if len(selection.running) >= self.max_num_seqs:
                break
            if not self._consider(job, selection, admitted, may_move):
                return job
        return None

    def _barred_before(self, last: Job | None, walk: Iterator[Job], admitted: Collection[str]) -> Iterator[Job]:
        """Yields the barred jobs of the rest of the walk before ``last``; with the first one, at most one a place."""
        before = itertools.takewhile(lambda job: job is not last, walk)
        barred = (job for job in before if self._is_barred(job, admitted))
        return itertools.islice(barred, self.max_num_seqs - 1)

    def _room_to_start(self) -> float:
        if self._start_room is None:
            self._start_room = self.start_room()
        return self._start_room

    def _keeps(self, job: Job) -> bool:
        """Keeps a job that may be moved out if all kept jobs fit with one token more each; returns whether it stays."""
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
        if self._start_room is not None and not (job.computed_len or job.host_len):
            self._start_room -= job.known_len
        return True


class StepSelector:
    """Asks the parts at each scheduling point, and books the consequences of their answers.

    Args:
        places: Says how many jobs execute at once.
        shares: Puts what the order ranks into the order of the tenants' turns.
        due: Jobs whose latest start has come, by id; read at each scheduling point.
        gives_way: Whether jobs step aside for those that are due, and flex jobs for all others; not inside a batch.
        offload: Says who decides about KV.

    Attributes:
        running: Admitted jobs that are to execute, best first.
        num_preemptions: Preemptions ordered so far, of all requests.
    """

    def __init__(
        self,
        policies: ReplicaPolicies,
        places: PlaceLimit,
        mirror: WorkerMirror,
        shares: FairShares,
        *,
        due: Mapping[str, ScheduledRequest] = MappingProxyType({}),
        gives_way: bool = True,
        offload: OffloadClient | None = None,
    ) -> None:
        self.order, self.admission, self.kv = policies.order, policies.admission, policies.kv
        self.running: list[Job] = []
        self.num_preemptions = 0
        self._places = places
        self._mirror = mirror
        self._shares = shares
        self._due = due
        self._gives_way = gives_way
        self._offload = offload or OffloadClient(0.0)
        self._lets_start = False  # the latest point has given a place to a newcomer

    def choose(self, now: float) -> Generator[Fact, None, bool]:
        """Decides a scheduling point, with a worker; returns False if all jobs here must go: a batch has no room."""
        mirror = self._mirror
        self._places.num = self.order.num_places(self._places.most, now)
        if (at_once := self._all_at_once()) is not None:
            self.running, room = at_once
            for job in self.running if room else ():
                if job.request_id not in mirror.admitted:
                    yield self._admit(job, room=room)
            self._lets_start = bool(room)
            return (yield from self._finish(KvMoves(), now))
        self.order.refresh(now)
        selection = self._select(now)
        for displaced in selection.displaced:
            yield from self._preempt(displaced, Residency.DEVICE, answers=mirror.short_blocks > 0)
        for job in selection.newcomers:
            yield self._admit(job)
        if selection.refused:
            yield NotAdmitted(selection.refused)
        self.running = selection.running
        self._lets_start = bool(selection.newcomers)
        if mirror.short_blocks > 0 or self.order.preemptive or self.kv.watches:
            moves = self._moves(mirror.view(self.running), now)
            if moves is None:
                return True
            return (yield from self._finish(moves, now))
        return (yield from self._finish(KvMoves(), now))

    def obey(self, question: OffloadQuestion, orders: OffloadOrders, now: float) -> Generator[Fact, None, bool]:
        """Carries out the KVOffloadManager's orders that still fit; the second half of ``choose``, with its result."""
        view = self._mirror.view(self.running)
        tally = self._offload.tally
        tally.answered += 1
        if orders.break_off:
            moves = KvMoves(break_off=self.kv.is_due(view))
            tally.refused += not moves.break_off
        else:
            moves, num_refused = standing_orders(question, orders, view, self._mirror.requests)
            tally.refused += num_refused
        return (yield from self._finish(moves, now))

    def _moves(self, view: KvView, now: float) -> KvMoves | None:
        """Returns the moves of this point; None while the KVOffloadManager is asked, and ``obey`` follows."""
        offload = self._offload
        if offload.waits:
            return None
        is_due = offload.deadline_s > 0 and self.kv.is_due(view)
        if offload.asks and is_due:
            offload.put(ask(offload.next_seq(), view, self.order, now), now)
        if not offload.decides_alone:
            return None if offload.waits else KvMoves()
        offload.tally.alone += is_due
        return self.kv.moves(view, now)

    def _finish(self, moves: KvMoves, now: float) -> Generator[Fact, None, bool]:
        if moves.break_off:
            self.running = []
            return False
        yield from self._carry_out(moves)
        if not self._lets_start:
            yield from self._make_way(now)
        return True

    def waiting(self, now: float) -> Iterator[Job]:
        """Returns the jobs that wait for a place and could use it, best first, lazily."""
        admitted, scheduled = self._mirror.admitted, self._mirror.requests

        def waits(job: Job) -> bool:
            return job.request_id not in admitted and not scheduled[job.request_id].stalled

        return self._shares.ranked(self.order, now, waits, admitted.values())

    def standbys(self, num: int, now: float) -> list[str]:
        """Returns the ids of requests that the worker may start by itself, best first."""
        if not self._mirror.num_waiting:
            return []
        return [job.request_id for job in itertools.islice(self._firm(self.waiting(now)), num)]

    def reserve_blocks(self) -> int:
        """Returns the blocks that the worker's own starts leave free for growth; 0 where KV can be evicted instead."""
        worker = self._mirror.worker
        if worker is None or self.kv.evicts:
            return 0
        return -(-self.admission.reserve(worker.num_blocks * worker.block_size) // worker.block_size)

    def _all_at_once(self) -> tuple[list[Job], Facts] | None:
        """Returns all jobs if places and memory suffice, so that few clients pay for no ranks; else None.

        Returns:
            The jobs, the last of which gives way if the worker runs short of blocks; and where some of them wait, the
            numbers by which memory lasts for all at their limits, whatever admission predicts.
        """
        mirror, room = self._mirror, dict[str, float | str]()
        if len(mirror.requests) > self._places.num or mirror.short_blocks or mirror.flex or self._due:
            return None
        if self.kv.watches or not self.order.ranks_on_demand:
            return None
        capacity = mirror.capacity()
        if mirror.num_waiting:
            longest = sum([each.prompt_len + each.max_new_tokens for each in mirror.requests.values()])
            limit = capacity - self.admission.reserve(capacity)
            if mirror.hosted or longest >= limit or not self.admission.admits_what_fits:
                return None
            room = {"longest_tokens": longest, "limit_tokens": limit, "capacity_tokens": capacity}
        running: list[Job] = [each for each in mirror.requests.values() if not each.stalled]
        if not room and sum([job.prompt_len + job.output_len + 1 for job in running]) > capacity:
            return None
        return sorted(running, key=lambda job: job.urgency), room

    def _select(self, now: float) -> Selection:
        """Selects the jobs to execute next; jobs whose clients do not read are left out."""
        awake: list[Job] = [each for each in self._mirror.admitted.values() if not each.stalled]
        if not (self._gives_way and self._mirror.flex):
            return self._walk(awake, now)
        firm = [job for job in awake if not job.is_flex]
        selection = self._walk(firm, now)
        self._add_flex(selection, is_behind=len(firm) > len(selection.running) - len(selection.newcomers), now=now)
        return selection

    def _add_flex(self, selection: Selection, *, is_behind: bool, now: float) -> None:
        """Adds the flex jobs that run on, and others where there is room; displaces those whose KV is in the way.

        Args:
            is_behind: Whether a firm job with a place does not execute.
        """
        mirror = self._mirror
        worker = mirror.worker
        assert worker is not None
        firm = [job for job in (*mirror.admitted.values(), *selection.newcomers) if not job.is_flex]
        used = self.reserve_blocks() + sum(next_blocks(job, worker.block_size) for job in firm)
        spare = [each for each in mirror.flex.values() if each.request_id in mirror.admitted]
        kept = with_room(spare, mirror.num_blocks - used, worker.block_size)
        selection.displaced = spare[len(kept) :]
        waits = is_behind or not all_stream(selection.running) or self._firm_waits(now)
        for each in kept:
            each.rests = waits
        room = self._places.num - len(selection.running)
        if waits or not room:
            return
        running = [each for each in kept if not each.stalled][:room]
        selection.running += running
        if len(running) < room and not selection.displaced:
            self._start_flex(selection, room - len(running), now)

    def _start_flex(self, selection: Selection, room: int, now: float) -> None:
        mirror = self._mirror
        holding = list[Job](mirror.admitted.values())
        start_room = functools.partial(self._start_room, holding)
        selector = Selector(self.admission, room, mirror.capacity(), start_room)
        started = selector.select(self.waiting(now), mirror.admitted, holding)
        selection.running += started.running
        selection.newcomers += started.newcomers
        for job in started.newcomers:
            mirror.flex[job.request_id].rests = False

    def _firm_waits(self, now: float) -> bool:
        """Returns whether a firm job waits for a place."""
        best = next(self.waiting(now), None)
        return best is not None and not best.is_flex

    def _walk(self, residents: list[Job], now: float) -> Selection:
        """Selects the firm jobs to execute next.

        Args:
            residents: Jobs with a place.
        """
        mirror = self._mirror
        admitted = mirror.admitted
        if mirror.short_blocks > 0:  # the last lose their KV: those of the tenant that is furthest ahead
            residents = self._shares.arranged(residents)
        if not self.order.preemptive and (mirror.num_waiting == 0 or (mirror.is_answering and not self.kv.evicts)):
            return Selection(due_first(residents))  # freed blocks are for the jobs that needed them
        selector = Selector(
            self.admission,
            self._places.num,
            mirror.capacity(),
            start_room=functools.partial(self._start_room, residents),
        )
        fixed = None if self.kv.evicts else self._fixed()
        if self.order.preemptive:
            scheduled = mirror.requests
            ranked = self._shares.ranked(self.order, now, lambda job: not scheduled[job.request_id].stalled)
            return selector.select(self._firm(ranked), admitted, fixed, lambda: self._holders(now))
        first, aside = self._aside(due_first(residents)) if self._due else (residents, [])
        taken = {job.request_id for job in first} if aside else ()
        others = (job for job in self._firm(self.waiting(now)) if job.request_id not in taken)
        selection = selector.select(itertools.chain(first, others), admitted, fixed)
        selection.running += aside[: self._places.num - len(selection.running)]
        return selection

    def _start_room(self, residents: list[Job]) -> float:
        return self.kv.start_room(self._mirror.view(residents))

    def _fixed(self) -> list[Job]:
        """Returns the jobs with a place whose memory cannot be taken."""
        jobs = self._mirror.admitted.values()
        return [job for job in jobs if not job.is_flex] if self._yields_to_firm else list(jobs)

    @property
    def _yields_to_firm(self) -> bool:
        return self._gives_way and bool(self._mirror.flex)

    def _firm(self, ranked: Iterator[Job]) -> Iterator[Job]:
        """Leaves out flex jobs, which every ranking has behind the firm ones, if they yield."""
        return itertools.takewhile(lambda job: not job.is_flex, ranked) if self._yields_to_firm else ranked

    def _aside(self, residents: list[Job]) -> tuple[list[Job], list[Job]]:
        admitted = self._mirror.admitted
        due: list[Job] = [job for rid, job in self._due.items() if rid not in admitted and not job.stalled]
        return step_aside(residents, due, max(0, self._places.num - len(residents)))

    def _holders(self, now: float) -> list[Job]:
        """Returns the jobs with a place or with KV whose clients read, best first."""
        mirror = self._mirror
        jobs = [each for each in (mirror.admitted | mirror.hosted).values() if not each.stalled]
        if self._yields_to_firm:
            jobs = [each for each in jobs if not each.is_flex]
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

    def _admit(self, job: Job, *, ahead: bool = False, room: Facts | None = None) -> Admitted:
        mirror = self._mirror
        scheduled = mirror.admitted[job.request_id] = mirror.requests[job.request_id]
        scheduled.told = None
        returns = scheduled.residency is Residency.HOST
        if returns:
            mirror.move(scheduled, Residency.DEVICE)
        return Admitted(scheduled, returns, ahead, room)

    def _preempt(self, job: Job, to: Residency, *, answers: bool = True) -> Iterator[Fact]:
        """Takes the job's place away; its KV is moved to the host, or dropped wherever it is.

        Args:
            answers: As in ``WorkerMirror.drop_kv``.
        """
        mirror = self._mirror
        scheduled = mirror.requests[job.request_id]
        to_host = to is Residency.HOST
        yield Evicted(scheduled, to_host, mirror.short_blocks)
        if mirror.admitted.pop(job.request_id, None) is not None:
            self.running = [each for each in self.running if each is not job]
        self.num_preemptions += 1
        scheduled.rests = scheduled.is_flex  # the worker may not start it by itself
        if to_host:
            mirror.move(scheduled, to)
        else:
            mirror.drop_kv(scheduled, answers=answers)

    def _make_way(self, now: float) -> Iterator[Fact]:
        """Takes KV and places from jobs whose clients do not read, if other jobs wait."""
        mirror = self._mirror
        resting = [each for each in mirror.admitted.values() if each.stalled]
        if resting and mirror.preemption_is_known and next(self.waiting(now), None) is not None:
            host_free = mirror.view(self.running).host_free
            for job in reversed(resting):
                fits = 0 < job.computed_len <= host_free and self.kv.swaps
                host_free -= job.computed_len if fits else 0
                yield from self._preempt(job, Residency.HOST if fits else Residency.DEVICE)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless all jobs that are to execute have places."""
        if not {job.request_id for job in self.running} <= self._mirror.admitted.keys():
            raise IntegrityError("a request that is not admitted is to execute")
