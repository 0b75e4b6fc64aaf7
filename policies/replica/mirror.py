"""The books of a replica's scheduler: its requests, and its worker as last reported and since ordered."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping

from farsight.core.errors import IntegrityError
from farsight.core.key_sums import KeySums
from farsight.core.messages.plans import (
    FinishedSequence,
    KVCacheEvent,
    SlotProgress,
    StepReport,
    TenantService,
    WorkerReady,
    WorkerState,
)
from farsight.core.messages.requests import Key
from farsight.core.request import Request, Residency, SequenceStatus
from farsight.kvcache.block_manager import NO_PARENT
from farsight.kvcache.cache_journal import CacheMirror
from farsight.policies.interfaces import Job, KvView, ScheduledRequest, make_scheduled

_WHOLE = (SequenceStatus.FINISHED_STOPPED, SequenceStatus.FINISHED_LENGTH)

NUM_REMEMBERED = 4096
"""Most ended requests that a Scheduler still knows when asked: their last tokens may be on the way to the ingress."""

LOOK_UPS = 64
"""Most requests looked up at one report: about half a millisecond. If a change concerns more, the oldest come first."""

_Boundary = tuple[int, int]
"""The last cached block of a prompt and the first that is not; ``NO_PARENT`` where there is none."""


class WorkerMirror:
    """The worker as known here. The worker is the truth; orders count as done here before the worker knows them.

    A report costs O(its contents + requests with a place or with KV on the host), however many wait.

    Args:
        changed: Called with each job whose KV or hits have changed here; ``Order.changed``.

    Attributes:
        requests: All requests, by id.
        sums: Their sums.
        admitted: Requests with a place, in order of admission.
        flex: Requests that take what the others leave.
        hosted: Requests with KV on the host, or on its way there.
        shipped: Requests that a plan of this lease has named.
        worker: None while there is none.
        cache: The worker's prefix cache, where its reports tell of it.
        report_seq: Number of the latest report.
        plan_seq: Number of the latest plan.
        short_blocks: As in ``StepReport``, from the latest report.
        stale: The worker must be sent a plan, whichever requests are to execute.
    """

    def __init__(self, changed: Callable[[Job], None]) -> None:
        self.requests: dict[str, ScheduledRequest] = {}
        self.sums = KeySums()
        self.admitted: dict[str, ScheduledRequest] = {}
        self.flex: dict[str, ScheduledRequest] = {}
        self.hosted: dict[str, ScheduledRequest] = {}
        self.shipped: dict[str, ScheduledRequest] = {}
        self.worker: WorkerReady | None = None
        self.lease = 0
        self.cache = CacheMirror()
        self.report_seq = self.plan_seq = 0
        self.short_blocks = 0
        self.stale = False
        self._changed = changed
        self._hits = ReplicaHits(self.cache, changed)
        self._numbers = itertools.count()
        self._undelivered: dict[str, ScheduledRequest] = {}  # shipped; the worker may not have them yet
        self._recent: dict[Key, None] = {}  # ended lately, oldest first
        self._shared_blocks = 0  # as last reported
        self._on_host = 0  # blocks of all in ``hosted``
        self._leaving: set[str] = set()  # those in ``hosted`` on their way to the host
        self._applied_plan_seq = 0  # the worker's plan in force at the last report
        self._preempted_in = 0  # plan that carries the latest preemption: older pressure is already answered
        self._services: dict[str, float] = {}  # the worker's sums by tenant, as last told
        self.num_prompt_tokens = 0
        self.gpu_s = 0.0

    @property
    def num_waiting(self) -> int:
        return len(self.requests) - len(self.admitted)

    def end(self, scheduled: ScheduledRequest, finished: FinishedSequence, now: float) -> None:
        """Books the end of a sequence on the worker, perhaps before any report of its progress."""
        scheduled.end(finished.output_len, finished.ran_s, now)
        if finished.status in _WHOLE:
            self.prefilled(scheduled, scheduled.prompt_len)

    def prefilled(self, scheduled: ScheduledRequest, computed_len: int) -> None:
        """Counts the prompt tokens that are new among ``computed_len`` known ones."""
        more = min(computed_len, scheduled.prompt_len) - scheduled.prefilled_len
        if more > 0:
            scheduled.prefilled_len += more
            self.num_prompt_tokens += more

    @property
    def preemption_is_known(self) -> bool:
        """The worker has the plan that carries the latest preemption."""
        return self._applied_plan_seq >= self._preempted_in

    @property
    def is_answering(self) -> bool:
        """A preemption or an offload is on its way and will end the present shortage."""
        return not self.preemption_is_known or bool(self._leaving)

    def resting(self) -> tuple[Key, ...]:
        """Returns the keys of all requests if all wait for clients that do not read, else nothing."""
        if not all(each.stalled for each in self.requests.values()):
            return ()
        return self.keys()

    def keys(self) -> tuple[Key, ...]:
        """Returns the keys of all requests."""
        return tuple((each.request_id, each.request.attempt) for each in self.requests.values())

    def knows(self, key: Key) -> bool:
        """Returns whether this attempt, or a later one of the request, is here, or this attempt has ended lately."""
        request_id, attempt = key
        scheduled = self.requests.get(request_id)
        return (scheduled is not None and scheduled.request.attempt >= attempt) or key in self._recent

    def unshipped(self, key: Key) -> ScheduledRequest | None:
        """Returns the request of this attempt if no plan of this lease has named it; else None."""
        scheduled = self.requests.get(key[0])
        if scheduled is None or scheduled.request.attempt != key[1] or key[0] in self.admitted:
            return None
        return scheduled if scheduled.shipped_in is None else None

    def remember(self, key: Key) -> None:
        """Remembers that this attempt has ended."""
        self._recent[key] = None
        if len(self._recent) > NUM_REMEMBERED:
            del self._recent[next(iter(self._recent))]

    def add(self, request: Request, now: float) -> ScheduledRequest:
        scheduled = self.requests[request.request_id] = make_scheduled(request, now, next(self._numbers))
        self.sums.put(request.request_id, request.attempt)
        if scheduled.is_flex:
            self.flex[request.request_id] = scheduled
        if self.cache.seq is not None:
            self._hits.add(scheduled)
        return scheduled

    def remove(self, request_id: str) -> ScheduledRequest:
        scheduled = self.requests.pop(request_id)
        self.sums.discard(request_id)
        self._count_host(scheduled, 0, is_leaving=False)
        for table in (self.admitted, self.flex, self.hosted, self.shipped, self._undelivered):
            table.pop(request_id, None)
        self._hits.remove(request_id)
        return scheduled

    def connect(self, state: WorkerState, now: float) -> None:
        """Takes over a new worker, or one that outlived another Scheduler: its requests, and no others, are here."""
        self.lose_worker()
        self.worker, self.lease = state.ready, state.lease
        self._services = {each.tenant: each.gpu_s for each in state.report.services}  # an earlier Scheduler's
        self._hits = ReplicaHits(self.cache, self._changed, state.ready.block_size)
        for request in state.held:
            adopted = self.add(request, now)
            adopted.shipped_in, adopted.delivered, adopted.started = 0, True, True
            self.shipped[request.request_id] = adopted
        for progress in state.report.progress:
            adopted = self.requests[progress.request_id]
            adopted.num_preemptions, adopted.num_moves = progress.num_preemptions, progress.num_moves
            adopted.residency = progress.residency
            self.recount_host(adopted)
        self.stale = True

    def lose_worker(self) -> None:
        """Forgets the worker and all requests."""
        self.worker = None
        self.cache = CacheMirror()
        self._hits = ReplicaHits(self.cache, self._changed)
        self._shared_blocks = self.short_blocks = self._on_host = 0
        self._leaving.clear()
        self.sums = KeySums()
        self.plan_seq = self.report_seq = self._applied_plan_seq = self._preempted_in = 0
        for table in (self.requests, self.admitted, self.flex, self.hosted, self.shipped, self._undelivered):
            table.clear()

    def apply_report(self, report: StepReport) -> bool:
        """Takes over what a report says of the whole worker.

        Returns False and changes nothing if the report is stale, from another worker or under another lease.
        """
        worker = self.worker
        if worker is None or report.worker_incarnation != worker.worker_incarnation or report.lease != self.lease:
            return False
        if report.report_seq <= self.report_seq:
            return False
        self.report_seq = report.report_seq
        self._applied_plan_seq = report.plan_seq
        self._shared_blocks, self.short_blocks = report.shared_blocks, report.short_blocks
        for scheduled in list(self._undelivered.values()):
            if scheduled.shipped_in is not None and report.plan_seq >= scheduled.shipped_in:
                scheduled.delivered = True
                del self._undelivered[scheduled.request_id]
        return True

    def apply_services(self, services: Iterable[TenantService]) -> list[tuple[str, float]]:
        """Takes over the tenants' sums; returns (tenant, GPU-seconds since the last sum) where a sum has grown."""
        grown = []
        for each in services:
            more_s = each.gpu_s - self._services.get(each.tenant, 0.0)
            if more_s > 0:
                self._services[each.tenant] = each.gpu_s
                grown.append((each.tenant, more_s))
                self.gpu_s += more_s
        return grown

    def apply_progress(self, scheduled: ScheduledRequest, progress: SlotProgress, now: float) -> float:
        """Takes over what a report says of one request; returns the seconds that it ran since the report before."""
        assert self.worker is not None
        believed_len = scheduled.cached_len
        ran_s = scheduled.update(progress, self.worker.block_size)
        if scheduled.first_token_at is None and progress.output_len:
            scheduled.first_token_at = now
        self.prefilled(scheduled, progress.computed_len)
        if scheduled.num_blocks or scheduled.cached_len != believed_len:
            self._hits.reported(scheduled)
        if scheduled.num_host_blocks or scheduled.counted_on_host or scheduled.residency is Residency.HOST:
            self.recount_host(scheduled)
        self._changed(scheduled)
        return ran_s

    def apply_notices(self, notices: Iterable[KVCacheEvent]) -> list[KVCacheEvent]:
        """Returns the cache events not seen before and looks up the requests whose cached part may have changed."""
        return self._hits.apply(notices, self.requests)

    def ship(self, scheduled: ScheduledRequest) -> None:
        """Books that the latest plan names the request, and carries it unless the worker is known to have it."""
        if scheduled.shipped_in is None:
            scheduled.shipped_in = self.plan_seq
            self.shipped[scheduled.request_id] = scheduled
            self._undelivered[scheduled.request_id] = scheduled

    def drop_kv(self, scheduled: ScheduledRequest, *, answers: bool = True) -> None:
        """Books that the request's KV is ordered dropped, wherever it is; ``answers``: because memory is short."""
        scheduled.drop_kv()
        self._changed(scheduled)
        if scheduled.residency is Residency.HOST:
            self.move(scheduled, Residency.DEVICE)
        self.recount_host(scheduled)
        self.stale = True
        if answers:
            self.mark_preemption()

    def move(self, scheduled: ScheduledRequest, residency: Residency) -> None:
        """Books that the request's KV is ordered to the host, or back."""
        scheduled.told = None
        scheduled.residency = residency
        scheduled.num_moves += 1
        self.recount_host(scheduled)
        self.stale = True
        if residency is Residency.HOST:
            self.mark_preemption()

    def mark_preemption(self) -> None:
        """Notes that the next plan frees blocks: until it is in force, the reported shortage counts as answered."""
        self._preempted_in = self.plan_seq + 1

    def recount_host(self, scheduled: ScheduledRequest) -> None:
        """Counts the request's blocks on the host again, which may have changed."""
        num_blocks = scheduled.blocks_on_host
        if not num_blocks and not scheduled.counted_on_host:
            return
        self._count_host(scheduled, num_blocks, is_leaving=scheduled.is_leaving)
        if num_blocks:
            self.hosted[scheduled.request_id] = scheduled
        else:
            self.hosted.pop(scheduled.request_id, None)

    def _count_host(self, scheduled: ScheduledRequest, num_blocks: int, *, is_leaving: bool) -> None:
        self._on_host += num_blocks - scheduled.counted_on_host
        scheduled.counted_on_host = num_blocks
        if is_leaving:
            self._leaving.add(scheduled.request_id)
        else:
            self._leaving.discard(scheduled.request_id)

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool; a block that sequences share counts once for each."""
        assert self.worker is not None
        return self.worker.num_blocks + self._shared_blocks

    def capacity(self) -> int:
        """Returns the KV tokens that jobs may hold: ``num_blocks`` in tokens, less the unused ends of blocks."""
        assert self.worker is not None
        size = self.worker.block_size
        ends = sum([-(each.prompt_len + each.output_len) % size for each in self.admitted.values()])
        return self.num_blocks * size - ends

    def view(self, running: list[Job]) -> KvView:
        """Returns where KV is if these jobs execute. KV ordered away counts as gone; KV yet to come is still needed."""
        worker = self.worker
        assert worker is not None
        size = worker.block_size
        taken = {job.request_id for job in running}
        held = sum([each.num_blocks for each in self.admitted.values()]) - self._shared_blocks
        starting = [job.known_len for job in running if self.requests[job.request_id].num_blocks == 0]
        short = 0 if self.is_answering else self.short_blocks
        return KvView(
            running=running,
            idle=[each for rid, each in self.admitted.items() if rid not in taken],
            offloaded=[
                each for rid, each in self.hosted.items() if each.residency is Residency.HOST and rid not in taken
            ],
            free=(worker.num_blocks - held) * size,
            needed=(sum(-(-known_len // size) for known_len in starting) + short) * size,
            host_free=(worker.num_host_blocks - self._on_host) * size,
            host_capacity=worker.num_host_blocks * size,
            block_size=size,
            short=short * size,
        )

    def check_integrity(self) -> None:
        """Raises IntegrityError unless places, lengths and payloads agree."""
        self._hits.check_integrity()
        if self.shipped.keys() != {rid for rid, each in self.requests.items() if each.shipped_in is not None}:
            raise IntegrityError("what has been shipped and what is known to be disagree")
        if not self.admitted.keys() <= self.requests.keys():
            raise IntegrityError(f"admitted {set(self.admitted)} are not all known: {set(self.requests)}")
        if self._on_host != sum(each.blocks_on_host for each in self.hosted.values()):
            raise IntegrityError("the blocks on the host are counted wrong")
        if self._leaving != {rid for rid, each in self.hosted.items() if each.is_leaving}:
            raise IntegrityError("the requests on their way to the host differ from those booked so")
        for request_id, scheduled in self.requests.items():
            if scheduled.delivered and scheduled.shipped_in is None:
                raise IntegrityError(f"{request_id}: delivered but never shipped")
            if scheduled.known_len > scheduled.max_total_len:
                raise IntegrityError(f"{request_id}: longer than it may be")
            if (scheduled.blocks_on_host > 0) != (request_id in self.hosted):
                raise IntegrityError(f"{request_id}: on the host, but not booked as such, or booked but not there")


class ReplicaHits:
    """Looks up the cached parts of prompts, but only where a part may have grown or shrunk.

    The predecessors of a cached block are cached too. So the cached part of a prompt changes only if its last block is
    evicted or the first block after it is stored: requests are found by these two. A report costs O(its contents +
    ``LOOK_UPS``).

    Args:
        cache: The blocks that the worker caches.
        changed: Called with each job whose hits have changed.
        block_size: Tokens of a block of the worker.
    """

    def __init__(self, cache: CacheMirror, changed: Callable[[Job], None], block_size: int = 1) -> None:
        self._cache = cache
        self._changed = changed
        self._block_size = block_size
        self._boundaries: dict[str, _Boundary] = {}
        self._by_last: dict[int, dict[str, ScheduledRequest]] = {}
        self._by_next: dict[int, dict[str, ScheduledRequest]] = {}
        self._due: dict[str, ScheduledRequest] = {}
        self._reported: dict[str, ScheduledRequest] = {}  # looked up when they wait again

    @property
    def num_due(self) -> int:
        """Requests to be looked up at the next reports."""
        return len(self._due)

    def add(self, scheduled: ScheduledRequest) -> None:
        """Looks up a request that has come while the cache is known."""
        self._look_up(scheduled)

    def remove(self, request_id: str) -> None:
        """Forgets a request that has left; unknown ids are ignored."""
        self._due.pop(request_id, None)
        self._reported.pop(request_id, None)
        self._take_out(request_id)

    def reported(self, scheduled: ScheduledRequest) -> None:
        """Notes that the worker has reported the request's hits: they are looked up when it waits again."""
        self._reported[scheduled.request_id] = scheduled

    def apply(self, notices: Iterable[KVCacheEvent], everyone: Mapping[str, ScheduledRequest]) -> list[KVCacheEvent]:
        """Returns the events not seen before; looks up the requests that they concern.

        Args:
            everyone: All requests by id, the oldest first.
        """
        news = [notice for notice in notices if self._cache.take(notice)]
        for notice in news:
            if notice.whole:
                self._due = dict(everyone)
                continue
            for name in notice.evicted:
                self._due.update(self._by_last.get(name, {}))
            for run in notice.stored:
                for name in run.hashes:
                    self._due.update(self._by_next.get(name, {}))
        if news:
            self._due.update((rid, each) for rid, each in self._reported.items() if not each.num_blocks)
        for request_id in list(itertools.islice(self._due, LOOK_UPS)):
            self._look_up(self._due.pop(request_id))
        return news

    def _look_up(self, scheduled: ScheduledRequest) -> None:
        """Looks up the cached length of the request's prompt, of which at least one token is always computed."""
        hashes, job, size = scheduled.request.prefix_hashes, scheduled, self._block_size
        if len(hashes) != job.prompt_len // size:
            return
        num_cached = self._cache.num_cached(hashes)
        self._put(scheduled, _boundary(hashes, num_cached))
        if scheduled.num_blocks:  # the worker has reported its hits
            self._reported[job.request_id] = scheduled
            return
        self._reported.pop(job.request_id, None)
        cached_len = min(num_cached, (job.prompt_len - 1) // size) * size
        if cached_len != job.cached_len:
            job.cached_len, scheduled.told = cached_len, None
            self._changed(job)

    def _put(self, scheduled: ScheduledRequest, boundary: _Boundary) -> None:
        request_id = scheduled.request_id
        if self._boundaries.get(request_id) == boundary:
            return
        self._take_out(request_id)
        self._boundaries[request_id] = boundary
        for table, name in zip((self._by_last, self._by_next), boundary, strict=True):
            if name != NO_PARENT:
                table.setdefault(name, {})[request_id] = scheduled

    def _take_out(self, request_id: str) -> None:
        boundary = self._boundaries.pop(request_id, None)
        if boundary is None:
            return
        for table, name in zip((self._by_last, self._by_next), boundary, strict=True):
            if name != NO_PARENT:
                del table[name][request_id]
                if not table[name]:
                    del table[name]

    def check_integrity(self) -> None:
        """Raises IntegrityError unless each request that is not due has the boundary that the cache gives."""
        for request_id, boundary in self._boundaries.items():
            for table, name in zip((self._by_last, self._by_next), boundary, strict=True):
                if name != NO_PARENT and request_id not in table.get(name, {}):
                    raise IntegrityError(f"{request_id} is not found by the end of its cached part")
        for table in (self._by_last, self._by_next):
            for waiting in table.values():
                for request_id, scheduled in waiting.items():
                    hashes = scheduled.request.prefix_hashes
                    actual = _boundary(hashes, self._cache.num_cached(hashes))
                    if request_id not in self._due and self._boundaries[request_id] != actual:
                        raise IntegrityError(f"{request_id}: its cached part has changed and was not looked up again")


def _boundary(hashes: tuple[int, ...], num_cached: int) -> _Boundary:
    last = hashes[num_cached - 1] if num_cached else NO_PARENT
    return last, hashes[num_cached] if num_cached < len(hashes) else NO_PARENT
