"""Fair shares among tenants, above any order: priority class, then the tenant served least, then the order.

The rule is that of the Virtual Token Counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024):
each tenant has a counter of the service it got, the least counter is served next, and a tenant that comes back begins
at the least counter of the present tenants, so that no credit is saved up. The unit here is GPU-seconds of the dominant
share (``core.costs.row_shares``, as the worker measures them) over the tenant's weight.

docs/policies/fair_shares.md states the bound on the difference between two tenants, and proves it.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial

from farsight.core.decisions import Facts
from farsight.core.errors import IntegrityError
from farsight.policies.interfaces import Job, Order, RanksSome

AHEAD_S = 1.0
"""Seconds that a walk counts ahead for each job that runs or is yielded, by the job's share of the replica. So free
slots are divided, and shares that differ are evened out within about this time instead of all at once."""

FEW = 64
"""Most jobs of a tenant that are ranked by themselves, where the order can: the walk then does not search for them
among all jobs."""

Wanted = Callable[[Job], bool]


class ServiceCounters:
    """Service by tenant, in GPU-seconds over weight."""

    def __init__(self) -> None:
        self._floor = 0.0
        self._weights: dict[str, float] = {}
        self._active: dict[str, float] = {}
        self._idle: dict[str, float] = {}

    def __getitem__(self, tenant: str) -> float:
        """Returns the counter of an active tenant."""
        return self._active[tenant]

    def __len__(self) -> int:
        """Returns the number of active tenants."""
        return len(self._active)

    def enter(self, tenant: str) -> None:
        """Activates a tenant at its first job; raises its counter to the least active counter if it is below that."""
        self._raise_floor()
        self._active[tenant] = max(self._idle.pop(tenant, 0.0), self._floor)

    def leave(self, tenant: str) -> None:
        """Deactivates a tenant whose last job has gone; keeps the service it got beyond the others, and no credit."""
        counter = self._active.pop(tenant)
        self._idle[tenant] = counter
        if not self._active:
            self._floor = max(self._floor, counter)
        self._raise_floor()
        self._idle = {name: value for name, value in self._idle.items() if value > self._floor}

    def set_weight(self, tenant: str, weight: float) -> None:
        """Sets a tenant's weight; service already counted stays as it is."""
        self._weights[tenant] = weight

    def charge(self, tenant: str, gpu_s: float) -> None:
        """Adds service that the tenant got for jobs that are here or have left."""
        scaled = self.scaled(tenant, gpu_s)
        if tenant in self._active:
            self._active[tenant] += scaled
        else:
            self._idle[tenant] = max(self._idle.get(tenant, 0.0), self._floor) + scaled

    def scaled(self, tenant: str, gpu_s: float) -> float:
        """Returns the service as the tenant's counter counts it: over the tenant's weight."""
        return gpu_s / self._weights.get(tenant, 1.0)

    def _raise_floor(self) -> None:
        if self._active:
            self._floor = max(self._floor, min(self._active.values()))


class FairShares:
    """Puts the jobs that an order ranks into the order of their tenants' turns.

    The order alone decides among one tenant's jobs, and where only one tenant has any. It is work-conserving: each walk
    yields every job that the order would. Deadlines order the jobs of one tenant, not those of two; priorities are
    classes of all tenants, within the range that each may use.

    ``add``, ``remove`` and ``charge`` cost O(1), and O(tenants) at a tenant's first and last job. The first k jobs of
    a walk cost O(tenants + k log tenants) beyond the order's own work, if the order ``RanksSome`` and one tenant
    at most has more than ``FEW`` jobs; otherwise the walk reads on in the order until it finds the tenant's next job.

    Args:
        max_num_seqs: Jobs that execute together at most.
        ahead_s: As ``AHEAD_S``.

    Attributes:
        capacity: KV tokens of the replica; 0 while they are unknown.
    """

    def __init__(self, max_num_seqs: int, ahead_s: float = AHEAD_S) -> None:
        self.counters = ServiceCounters()
        self.capacity = 0
        self._slot_share = 1.0 / max_num_seqs
        self._ahead_s = ahead_s
        self._classes: dict[int, dict[str, dict[str, Job]]] = {}
        self._num_jobs: dict[str, int] = {}

    @property
    def is_shared(self) -> bool:
        """Whether several tenants have jobs here."""
        return len(self._num_jobs) > 1

    def add(self, job: Job) -> None:
        """Adds a job that has arrived and is not here yet."""
        tenant = job.tenant
        self.counters.set_weight(tenant, job.weight)
        if tenant not in self._num_jobs:
            self.counters.enter(tenant)
            self._num_jobs[tenant] = 0
        self._num_jobs[tenant] += 1
        self._classes.setdefault(job.priority, {}).setdefault(tenant, {})[job.request_id] = job

    def remove(self, job: Job) -> None:
        """Removes a job that has ended or was aborted; unknown jobs are ignored."""
        tenant, priority = job.tenant, job.priority
        tenants = self._classes.get(priority)
        jobs = None if tenants is None else tenants.get(tenant)
        if tenants is None or jobs is None or jobs.pop(job.request_id, None) is None:
            return
        if not jobs:
            del tenants[tenant]
            if not tenants:
                del self._classes[priority]
        num_left = self._num_jobs[tenant] - 1
        if num_left:
            self._num_jobs[tenant] = num_left
        else:
            del self._num_jobs[tenant]
            self.counters.leave(tenant)

    def charge(self, tenant: str, gpu_s: float) -> None:
        """Charges the tenant for steps that ran for its jobs, whether these are still here or not."""
        self.counters.charge(tenant, gpu_s)

    def share(self, job: Job) -> float:
        """Returns the larger of the job's shares of KV memory and slots, at most 1."""
        kv_share = job.known_len / self.capacity if self.capacity else 0.0
        return min(1.0, max(kv_share, self._slot_share))

    def ranked(self, order: Order, now: float, wanted: Wanted, running: Iterable[Job] = ()) -> Iterator[Job]:
        """Returns the wanted jobs, best first, lazily.

        Args:
            order: Ranks all jobs that are here, smaller priorities first among the wanted ones.
            running: Jobs that run whatever is decided: they count for their tenants as if they had run on.
        """
        if not self.is_shared:
            return filter(wanted, order.ranked(now))
        return self._by_class(order, now, wanted, running)

    def arranged(self, jobs: Collection[Job]) -> list[Job]:
        """Sorts jobs that an order has ranked by class and by their tenants' turns."""
        if not self.is_shared:
            return list(jobs)
        turns = _Turns(self, ())
        arranged: list[Job] = []
        by_class = sorted(jobs, key=_priority)
        for _, members in itertools.groupby(by_class, _priority):
            queues: dict[str, deque[Job]] = {}
            for job in members:
                queues.setdefault(job.tenant, deque()).append(job)
            arranged += turns.take({tenant: iter(queue) for tenant, queue in queues.items()})
        return arranged

    def explain(self, job: Job) -> Facts:
        """Returns the counter of the job's tenant if several tenants have jobs here, else nothing."""
        if not self.is_shared or job.tenant not in self._num_jobs:
            return {}
        return {"tenant_service_s": self.counters[job.tenant]}

    def ahead_s(self, job: Job) -> float:
        """Returns the service that a walk counts ahead for a job that runs or is to run."""
        return self.counters.scaled(job.tenant, self._ahead_s * self.share(job))

    def standing(self) -> dict[str, float]:
        """Returns the counter of each tenant that has jobs here."""
        return {tenant: self.counters[tenant] for tenant in self._num_jobs}

    def _by_class(self, order: Order, now: float, wanted: Wanted, running: Iterable[Job]) -> Iterator[Job]:
        turns = _Turns(self, running)
        reader = _Reader(filter(wanted, order.ranked(now)))
        for priority in sorted(self._classes):
            tenants = self._classes[priority]
            yield from turns.take(
                {tenant: self._queue(order, now, wanted, jobs, reader) for tenant, jobs in tenants.items()}
            )

    @staticmethod
    def _queue(order: Order, now: float, wanted: Wanted, jobs: Mapping[str, Job], reader: _Reader) -> Iterator[Job]:
        """Yields one tenant's wanted jobs of one class, as the order ranks them; does no work before the first read."""
        if len(jobs) > FEW:
            job = next(iter(jobs.values()))
            yield from reader.read(job.priority, job.tenant)
            return
        few = [job for job in jobs.values() if wanted(job)]
        if len(few) < 2:
            yield from few
        elif isinstance(order, RanksSome):
            yield from order.among(few, now)
        else:
            yield from itertools.islice(reader.read(few[0].priority, few[0].tenant), len(few))

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the tenants with jobs are those with active counters."""
        counted: dict[str, int] = {}
        for tenants in self._classes.values():
            for tenant, jobs in tenants.items():
                counted[tenant] = counted.get(tenant, 0) + len(jobs)
        if counted != self._num_jobs:
            raise IntegrityError(f"jobs by tenant: {counted} are here, {self._num_jobs} are counted")
        if len(self.counters) != len(counted):
            raise IntegrityError(f"{len(counted)} tenants have jobs, {len(self.counters)} have an active counter")


class _Turns:
    """One walk over the jobs: keeps count of the tenants' turns from class to class."""

    def __init__(self, shares: FairShares, running: Iterable[Job]) -> None:
        self._shares = shares
        self._standing = shares.standing()
        for job in running:
            self._standing[job.tenant] += shares.ahead_s(job)

    def take(self, queues: dict[str, Iterator[Job]]) -> Iterator[Job]:
        """Yields all jobs of these tenants: always the least served tenant's next, which then counts as run ahead."""
        standing = self._standing
        heap = [(standing[tenant], tenant) for tenant in queues]
        heapq.heapify(heap)
        while heap:
            tenant = heap[0][1]
            job = next(queues[tenant], None)
            if job is None:
                heapq.heappop(heap)
                continue
            yield job
            standing[tenant] += self._shares.ahead_s(job)
            heapq.heapreplace(heap, (standing[tenant], tenant))


class _Reader:
    """Reads a ranking once for several readers, each of which wants the jobs of one tenant and class."""

    def __init__(self, ranked: Iterator[Job]) -> None:
        self._ranked = ranked
        self._found: dict[tuple[int, str], deque[Job]] = {}
        self._next: Job | None = None

    def read(self, priority: int, tenant: str) -> Iterator[Job]:
        """Returns the tenant's jobs of the class, lazily; ends where a later class begins."""
        return iter(partial(self._one, priority, tenant), None)

    def _one(self, priority: int, tenant: str) -> Job | None:
        found = self._found.setdefault((priority, tenant), deque())
        while not found:
            job = self._next or next(self._ranked, None)
            self._next = job
            if job is None or job.priority > priority:
                return None
            self._next = None
            self._found.setdefault((job.priority, job.tenant), deque()).append(job)
        return found.popleft()


def _priority(job: Job) -> int:
    return job.priority
