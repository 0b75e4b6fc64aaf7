"""GPU-seconds of a worker that each sequence, and each tenant, has used."""

from __future__ import annotations

from collections import defaultdict
from typing import Protocol

from core.costs import A100_7B, StepCost, row_shares
from core.messages.plans import TenantService
from kvcache.step_batch import StepBatch


class Metered(Protocol):
    """A record that is charged for."""

    gpu_s: float
    tenant: str


class ServiceMeter:
    """Divides the time of steps among their rows, so that the rows' GPU-seconds add up to the worker's busy time.

    Sums by tenant count from the worker's start. They include the steps of sequences that were aborted later, so a
    client that cancels early gets no step for free.

    Args:
        max_num_seqs: Sequences of a step at most.
        capacity: Tokens of KV on the device.

    Attributes:
        cost: Prices of steps, of which only the proportions matter; assumed until the worker's steps are measured.
    """

    def __init__(self, max_num_seqs: int, capacity: int) -> None:
        self.cost: StepCost = A100_7B
        self._max_num_seqs = max_num_seqs
        self._capacity = capacity
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._grown: set[str] = set()  # since the last report
        self._told_in: dict[str, int] = {}  # by tenant: the first report of its latest sum, until it is acknowledged

    def shares(self, batch: StepBatch, num_steps: int = 1) -> list[float]:
        """Returns each item's share of the time of the batch, in order; the shares add up to 1. O(items)."""
        if len(batch.items) == 1:
            return [1.0]
        rows = [(item.start, item.num_tokens) for item in batch.items]
        return row_shares(self.cost, rows, self._max_num_seqs, self._capacity, num_steps)

    def charge(self, held: Metered, gpu_s: float) -> None:
        """Adds a sequence's share of a step."""
        tenant = held.tenant
        held.gpu_s += gpu_s
        self._sums[tenant] += gpu_s
        if tenant not in self._grown:
            self._grown.add(tenant)

    def services(self, report_seq: int) -> tuple[TenantService, ...]:
        """Returns the sums that the report of this number holds: all that the Scheduler may lack."""
        for tenant in self._grown:
            self._told_in[tenant] = report_seq
        self._grown.clear()
        return tuple(TenantService(tenant, self._sums[tenant]) for tenant in sorted(self._told_in))

    def services_with(self, tenants: dict[str, float]) -> tuple[TenantService, ...]:
        """Adds up the sums of these tenants and GPU-seconds that have not been charged yet."""
        return tuple(TenantService(name, self._sums.get(name, 0.0) + more) for name, more in sorted(tenants.items()))

    def acknowledge(self, report_seq: int) -> None:
        """Books that the Scheduler has every report up to this one."""
        if self._told_in:
            self._told_in = {tenant: seq for tenant, seq in self._told_in.items() if seq > report_seq}

    def tell_all(self) -> None:
        """Makes the next report hold all sums, for a new Scheduler."""
        self._grown.update(self._sums)
