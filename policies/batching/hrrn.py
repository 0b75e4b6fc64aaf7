"""Highest response ratio next: short work first, without starvation (Magnus III-E).

R = (T_q + T_s) / T_s, with T_q the time in the queue and T_s the estimated time of service. A short job overtakes a
long one that arrived a little earlier; each second of waiting raises the ratio of both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farsight.core.costs import StepCost
from farsight.core.decisions import Facts
from farsight.policies.batching.base import FormedBatch
from farsight.policies.interfaces import ORDERS, Job, Order, ReplicaContext
from farsight.policies.order.job_table import JobTable, in_order
from farsight.policies.settings import ServingTime

RIVALS = 4
"""Most other batches whose response ratio an explanation shows: those that have waited longest in the queue."""


def response_ratio(waited_s: float, service_s: float) -> float:
    """Returns R; infinity for an estimate of 0 s."""
    return 1 + waited_s / service_s if service_s > 0 else math.inf


class HighestResponseRatio:
    """Chooses the formed batch with the highest R; ties go to the earliest arrival, then to the first formed.

    T_q of a batch is the longest wait of its jobs. A choice calls the estimate once per batch.

    Args:
        serving_time_s: Estimated seconds that a batch takes.
    """

    def __init__(self, serving_time_s: ServingTime) -> None:
        self._serving_time_s = serving_time_s

    def __call__(self, batches: Sequence[FormedBatch], now: float) -> FormedBatch:
        return min(batches, key=lambda batch: (-self.ratio(batch, now), batch.arrived_at, batch.batch_id))

    def ratio(self, batch: FormedBatch, now: float) -> float:
        """Returns R of the batch at this instant."""
        service_s = self._serving_time_s(len(batch), batch.prompt_len, batch.predicted_len)
        return response_ratio(now - batch.arrived_at, service_s)

    def story(self, batch: FormedBatch, others: Iterable[FormedBatch], now: float) -> Facts:
        """Returns the chosen batch's ratio beside the ratios of ``RIVALS`` others, the highest first."""
        service_s = self._serving_time_s(len(batch), batch.prompt_len, batch.predicted_len)
        if service_s <= 0:
            return {}
        ratios = sorted((self.ratio(each, now) for each in itertools.islice(others, RIVALS)), reverse=True)
        return {
            "queued_s": now - batch.arrived_at,
            "service_s": service_s,
            "response_ratio": response_ratio(now - batch.arrived_at, service_s),
            "rival_ratios": ", ".join(f"{ratio:.2f}" for ratio in ratios),
        }


ESTIMATES = 64
"""Most jobs that are estimated again at one scheduling point after a change of prices."""

_COLUMNS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "priority": (np.int64, ()),
    "deadline_at": (np.float64, ()),
    "arrived_at": (np.float64, ()),
    "number": (np.int64, ()),
    "service_s": (np.float64, ()),
}


class HrrnOrder(Order):
    """HRRN for continuous batching, where the unit is the job; running jobs are not preempted.

    Ratios grow at different speeds, so ``ranked`` recomputes all ranks in a few numpy operations over all jobs. The
    estimate is called once for each new or changed job; the rest is O(1).

    Args:
        remaining_s: (job, step cost) -> estimated seconds of service that the job still needs.
        cost: The step cost until one is measured.
    """

    preemptive = False

    def __init__(self, remaining_s: Callable[[StepCost, Job], float], cost: StepCost) -> None:
        self._remaining_s = remaining_s
        self._cost = cost
        self._table = JobTable(_COLUMNS)
        self._numbers = itertools.count()
        self._due: dict[str, Job] = {}
        self._jobs: dict[str, Job] = {}
        self._stale: dict[str, Job] = {}  # Jobs estimated with an older price.

    def add(self, job: Job, now: float) -> None:
        row = self._table.add(job)
        for name in ("priority", "deadline_at", "arrived_at"):
            self._table.column(name)[row] = getattr(job, name)
        self._table.column("number")[row] = next(self._numbers)
        self._due[job.request_id] = self._jobs[job.request_id] = job

    def remove(self, job: Job) -> None:
        self._table.remove(job)
        for jobs in (self._jobs, self._due, self._stale):
            jobs.pop(job.request_id, None)

    def foreseen(self, job: Job) -> None:
        self.changed(job)

    def changed(self, job: Job) -> None:
        if self._table.row(job) is not None:
            self._due[job.request_id] = job

    def price(self, cost: StepCost, capacity: int) -> None:
        self._cost = cost
        self._stale = dict(self._jobs)
        self._renew()

    def refresh(self, now: float) -> None:
        """Renews the oldest estimates after a change of prices, at most ``ESTIMATES`` per scheduling point."""
        self._renew()

    def ranked(self, now: float) -> Iterator[Job]:
        """Yields the jobs by urgency, then the highest R, then arrival."""
        self._estimate()
        column: Callable[[str], NDArray[Any]] = self._table.column
        waited_s, service_s = now - column("arrived_at"), column("service_s")
        ratio = np.full(len(waited_s), math.inf)
        np.divide(waited_s, service_s, out=ratio, where=service_s > 0)
        ratio += 1
        keys = (column("priority"), column("deadline_at"), -ratio, column("arrived_at"), column("number"))
        jobs = self._table.jobs
        return (jobs[row] for row in in_order(keys))

    def ratio(self, job: Job, now: float) -> float:
        """Returns R of the job at this instant."""
        return response_ratio(now - job.arrived_at, self._remaining_s(self._cost, job))

    def explain(self, job: Job, now: float) -> Facts:
        """Returns the job's response ratio now, and its estimated service time in seconds."""
        return {"response_ratio": self.ratio(job, now), "service_s": self._remaining_s(self._cost, job)}

    def _renew(self) -> None:
        for request_id in list(itertools.islice(self._stale, ESTIMATES)):
            self._due[request_id] = self._stale.pop(request_id)

    def _estimate(self) -> None:
        service_s = self._table.column("service_s")
        for job in self._due.values():
            row = self._table.row(job)
            assert row is not None
            service_s[row] = self._remaining_s(self._cost, job)
        self._due.clear()


def remaining_service_s(cost: StepCost, job: Job) -> float:
    """Returns the seconds until a job would end if it ran alone: the missing KV, then one step per predicted token."""
    expected = job.max_new_tokens if job.forecast is None else min(job.forecast.mean, job.max_new_tokens)
    missing = job.missing_len
    prefill_s = cost.prefill_s(missing, job.known_len - missing)
    return prefill_s + max(1.0, expected - job.output_len) * cost.decode_s(job.known_len)


@ORDERS.register("hrrn", reads_forecasts=True)
def build_hrrn(context: ReplicaContext) -> HrrnOrder:
    """Runs the job with the highest response ratio next, for continuous batching."""
    return HrrnOrder(remaining_service_s, context.settings.cost)
