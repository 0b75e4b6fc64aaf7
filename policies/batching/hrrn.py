"""Highest response ratio next: short work first, but no work waits for ever (Magnus III-E).

R = (T_q + T_s) / T_s, with T_q the time in the queue and T_s the estimated time of service. A short job overtakes a
long one that came a little earlier; each second of waiting raises the ratio of both.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence

from core.costs import StepCost
from core.decisions import Facts
from policies.batching.base import FormedBatch
from policies.interfaces import ORDERS, Order, ReplicaContext
from policies.job import Job
from policies.settings import ServingTime


def response_ratio(waited_s: float, service_s: float) -> float:
    """R; infinity for what is estimated to take no time."""
    return 1 + waited_s / service_s if service_s > 0 else math.inf


class HighestResponseRatio:
    """The choice among formed batches: the highest R; of equals the earliest arrival, then the first formed.

    T_q of a batch is the longest wait of its jobs. One call of the estimate for each batch.

    Args:
        serving_time_s: Estimated seconds that a batch takes.
    """

    def __init__(self, serving_time_s: ServingTime) -> None:
        self._serving_time_s = serving_time_s

    def __call__(self, batches: Sequence[FormedBatch], now: float) -> FormedBatch:
        return min(batches, key=lambda batch: (-self.ratio(batch, now), batch.arrived_at, batch.batch_id))

    def ratio(self, batch: FormedBatch, now: float) -> float:
        """R of the batch at this instant."""
        service_s = self._serving_time_s(len(batch), batch.prompt_len, batch.predicted_len)
        return response_ratio(now - batch.arrived_at, service_s)


class HrrnOrder(Order):
    """HRRN for continuous batching, where the unit is the job; running jobs are left alone.

    Ratios grow at different speeds, so ranks are found anew at every scheduling point: ``ranked`` costs one call of the
    estimate for each job and O(log n) for each job taken; the rest is O(1).

    Args:
        remaining_s: Estimated seconds of service that a job still needs where steps cost so much.
        cost: What steps cost, until it is measured.
    """

    preemptive = False

    def __init__(self, remaining_s: Callable[[StepCost, Job], float], cost: StepCost) -> None:
        self._remaining_s = remaining_s
        self._cost = cost
        self._jobs: dict[str, Job] = {}

    def add(self, job: Job, now: float) -> None:
        self._jobs[job.request_id] = job

    def remove(self, job: Job) -> None:
        self._jobs.pop(job.request_id, None)

    def price(self, cost: StepCost, capacity: int) -> None:
        self._cost = cost

    def ranked(self, now: float) -> Iterator[Job]:
        """By urgency, then the highest R, then arrival."""
        heap = [
            (
                job.urgency,
                -response_ratio(now - job.arrived_at, self._remaining_s(self._cost, job)),
                job.arrived_at,
                place,
                job,
            )
            for place, job in enumerate(self._jobs.values())
        ]
        heapq.heapify(heap)
        while heap:
            yield heapq.heappop(heap)[-1]

    def ratio(self, job: Job, now: float) -> float:
        """R of the job at this instant."""
        return response_ratio(now - job.arrived_at, self._remaining_s(self._cost, job))

    def explain(self, job: Job, now: float) -> Facts:
        """Its response ratio now, and what it is made of."""
        return {"response_ratio": self.ratio(job, now), "service_s": self._remaining_s(self._cost, job)}


def remaining_service_s(cost: StepCost, job: Job) -> float:
    """Seconds until a job would end if it ran alone: what is missing of its KV, then one step a token foreseen."""
    expected = job.max_new_tokens if job.forecast is None else min(job.forecast.mean, job.max_new_tokens)
    missing = job.missing_len
    prefill_s = cost.prefill_s(missing, job.known_len - missing)
    return prefill_s + max(1.0, expected - job.output_len) * cost.decode_s(job.known_len)


@ORDERS.register("hrrn")
def build_hrrn(context: ReplicaContext) -> HrrnOrder:
    """Highest response ratio next, for continuous batching."""
    return HrrnOrder(remaining_service_s, context.settings.cost)
