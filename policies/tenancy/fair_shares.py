"""Fair shares: the tenant that has been served least goes first, and any order decides among its own jobs.

The rule is that of the Virtual Token Counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024):
each tenant has a counter of the service it got, the least counter is served next, and a tenant that comes back begins
at the least counter of those who are there, so that nothing is saved up. Its unit here is GPU-seconds of the dominant
share (Ghodsi et al., "Dominant Resource Fairness", NSDI 2011) over the tenant's weight.

**Bound.** While two tenants of weight 1 both have jobs waiting, and running jobs are not preempted, their counters
differ by at most ``num_slots * (c + p)``: c is the largest charge of one job from admission to end, p the largest
``ahead_s`` charge. For when a tenant's job was last admitted its counter was not above the other's, but for what the
same ranking had already set ahead (``num_slots * p``), and since then only the jobs that ran at that moment have added
to it (``num_slots * c``). So over any interval in which both wait, their service differs by at most twice that.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from core.costs import StepCost
from core.decisions import Facts
from core.errors import InvalidValueError
from policies.interfaces import ORDERS, Job, Order, ReplicaContext

AHEAD_S = 1.0
"""Seconds that a ranking counts ahead for each job it names, so that one tenant does not fill all free slots."""


class ServiceCounters:
    """Service by tenant, in GPU-seconds of dominant share over weight."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._floor = 0.0
        self._active: dict[str, float] = {}
        self._idle: dict[str, float] = {}
        for tenant, weight in self._weights.items():
            if not 0 < weight < math.inf:
                raise InvalidValueError(f"weights.{tenant}", weight, "a number > 0")

    def __getitem__(self, tenant: str) -> float:
        """Counter of an active tenant."""
        return self._active[tenant]

    def enter(self, tenant: str) -> None:
        """The tenant has its first job: its counter rises to the least of the active ones if it is below that."""
        self._raise_floor()
        self._active[tenant] = max(self._idle.pop(tenant, 0.0), self._floor)

    def leave(self, tenant: str) -> None:
        """The tenant's last job has gone. It keeps what it was served beyond the others, and no credit."""
        counter = self._active.pop(tenant)
        self._idle[tenant] = counter
        if not self._active:
            self._floor = max(self._floor, counter)
        self._raise_floor()
        self._idle = {name: value for name, value in self._idle.items() if value > self._floor}

    def charge(self, tenant: str, service_s: float) -> None:
        """Adds service that the tenant got."""
        self._active[tenant] += self.scaled(tenant, service_s)

    def scaled(self, tenant: str, service_s: float) -> float:
        """The service as the tenant's counter counts it."""
        return service_s / self._weights.get(tenant, 1.0)

    def _raise_floor(self) -> None:
        if self._active:
            self._floor = max(self._floor, min(self._active.values()))


@dataclass(slots=True)
class _Member:
    """A job, and how much of it had been computed when it was last charged."""

    tenant: str
    computed_len: int


class FairShares(Order):
    """An order for each tenant, and the least served tenant first.

    Work-conserving: ``ranked`` yields every job, so a slot is free only if no tenant has a job for it. Priorities and
    deadlines order the jobs of one tenant, not those of two: else a tenant could write itself to the front.

    ``add``, ``remove`` and ``ran`` cost what they cost in the inner order plus O(tenants) at a tenant's first and last
    job; the first k of ``ranked`` cost O(tenants + k log tenants).

    Args:
        make_order: Makes the order of one tenant.
        tenant_of: The tenant of a job.
        num_slots: Jobs that execute together at most.
        weights: By tenant; 1 where there is none.
    """

    def __init__(
        self,
        make_order: Callable[[], Order],
        tenant_of: Callable[[Job], str],
        num_slots: int,
        weights: Mapping[str, float] | None = None,
        ahead_s: float = AHEAD_S,
    ) -> None:
        if num_slots < 1:
            raise InvalidValueError("num_slots", num_slots, "an integer >= 1")
        self.preemptive = make_order().preemptive
        self.counters = ServiceCounters(weights)
        self._make_order = make_order
        self._tenant_of = tenant_of
        self._num_slots = num_slots
        self._ahead_s = ahead_s
        self._orders: dict[str, Order] = {}
        self._num_jobs: dict[str, int] = {}
        self._members: dict[str, _Member] = {}
        self._cost: StepCost | None = None
        self._capacity = 0

    def add(self, job: Job, now: float) -> None:
        tenant = self._tenant_of(job)
        if tenant not in self._num_jobs:
            self.counters.enter(tenant)
            self._num_jobs[tenant] = 0
        self._num_jobs[tenant] += 1
        self._members[job.request_id] = _Member(tenant, job.computed_len)
        self._order(tenant).add(job, now)

    def remove(self, job: Job) -> None:
        member = self._members.pop(job.request_id, None)
        if member is None:
            return
        self._orders[member.tenant].remove(job)
        self._num_jobs[member.tenant] -= 1
        if not self._num_jobs[member.tenant]:
            del self._num_jobs[member.tenant]
            self.counters.leave(member.tenant)

    def ranked(self, now: float) -> Iterator[Job]:
        """The first job of the least served tenant, then as if that job had run for ``ahead_s``, and so on."""
        heap = [(self.counters[tenant], tenant) for tenant in self._num_jobs]
        heapq.heapify(heap)
        jobs = {tenant: self._orders[tenant].ranked(now) for _, tenant in heap}
        while heap:
            counter, tenant = heapq.heappop(heap)
            job = next(jobs[tenant], None)
            if job is None:
                continue
            yield job
            ahead_s = self._ahead_s * self.share(job)
            heapq.heappush(heap, (counter + self.counters.scaled(tenant, ahead_s), tenant))

    def share(self, job: Job) -> float:
        """The larger of the job's shares of KV memory and slots, at most 1."""
        kv_share = job.known_len / self._capacity if self._capacity else 0.0
        return min(1.0, max(kv_share, 1.0 / self._num_slots))

    def ran(self, job: Job, duration_s: float, now: float) -> None:
        """Charges the dominant resource of the steps: compute, KV memory or slots."""
        member = self._members.get(job.request_id)
        if member is None:
            return
        computed = max(0, job.computed_len - member.computed_len)
        member.computed_len = job.computed_len
        compute_s = computed * self._cost.prefill_token_s if self._cost is not None else 0.0
        service_s = max(duration_s * self.share(job), min(duration_s, compute_s))
        self.counters.charge(member.tenant, service_s)
        self._orders[member.tenant].ran(job, duration_s, now)

    def price(self, cost: StepCost, capacity: int) -> None:
        self._cost, self._capacity = cost, capacity
        for order in self._orders.values():
            order.price(cost, capacity)

    def foreseen(self, job: Job) -> None:
        self._each_of(job, lambda order: order.foreseen(job))

    def changed(self, job: Job) -> None:
        self._each_of(job, lambda order: order.changed(job))

    def learn(self, job: Job, *, censored: bool) -> None:
        """What one tenant's jobs teach, its own order learns; the job has been removed already."""
        order = self._orders.get(self._tenant_of(job))
        if order is not None:
            order.learn(job, censored=censored)

    def refresh(self, now: float) -> None:
        for tenant in self._num_jobs:
            order = self._orders[tenant]
            order.on_move = self.on_move
            order.refresh(now)

    def slice_s(self, job: Job) -> float:
        return self._orders[self._members[job.request_id].tenant].slice_s(job)

    def explain(self, job: Job, now: float) -> Facts:
        """The tenant's counter, beside what its own order says."""
        member = self._members.get(job.request_id)
        if member is None:
            return {}
        facts = dict(self._orders[member.tenant].explain(job, now))
        return {**facts, "tenant_service_s": self.counters[member.tenant]}

    def _order(self, tenant: str) -> Order:
        """A tenant keeps its order while it has none of its jobs here, for what the order has learned."""
        order = self._orders.get(tenant)
        if order is None:
            self._orders[tenant] = order = self._make_order()
            order.on_move = self.on_move
            if self._cost is not None:
                order.price(self._cost, self._capacity)
        return order

    def _each_of(self, job: Job, call: Callable[[Order], None]) -> None:
        member = self._members.get(job.request_id)
        if member is not None:
            call(self._orders[member.tenant])


def fair_order(
    name: str, context: ReplicaContext, tenant_of: Callable[[Job], str], weights: Mapping[str, float] | None = None
) -> FairShares:
    """Fair shares above a registered order.

    It goes together with admissions and KV policies that need no particular order (``Part.needs``).

    Args:
        name: As in ``[scheduler] order``.

    Raises:
        ConfigError: There is no such order.
    """
    part = ORDERS.find(name)
    return FairShares(lambda: part.build(context), tenant_of, context.max_num_seqs, weights)
