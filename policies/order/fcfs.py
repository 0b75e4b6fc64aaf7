"""First come, first served: the order of Orca and vLLM, and the baseline of every paper here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from sortedcontainers import SortedDict

from farsight.core.costs import StepCost
from farsight.policies.interfaces import ORDERS, Job, Order, ReplicaContext

_Key = tuple[tuple[int, float], int]


class Fcfs(Order):
    """Jobs by arrival. A preempted job keeps its place, so it goes before all that came after it.

    ``add`` and ``remove`` cost O(log n).
    """

    preemptive = False

    def __init__(self) -> None:
        self._jobs: SortedDict[_Key, Job] = SortedDict()
        self._keys: dict[str, _Key] = {}
        self._arrivals = 0

    def add(self, job: Job, now: float) -> None:
        self._arrivals += 1
        key = job.urgency, self._arrivals
        self._keys[job.request_id] = key
        self._jobs[key] = job

    def remove(self, job: Job) -> None:
        key = self._keys.pop(job.request_id, None)
        if key is not None:
            del self._jobs[key]

    def foreseen(self, job: Job) -> None:
        """Does nothing: this order ignores forecasts."""

    def changed(self, job: Job) -> None:
        """Does nothing: lengths and KV do not matter."""

    def price(self, cost: StepCost, capacity: int) -> None:
        """Does nothing: time does not matter."""

    def learn(self, job: Job, *, censored: bool) -> None:
        """Does nothing: output lengths do not matter."""

    def ran(self, job: Job, duration_s: float, now: float) -> None:
        """Does nothing: the time that a job has run does not matter."""

    def refresh(self, now: float) -> None:
        """Does nothing: no promotion or rank change is ever due."""

    def ranked(self, now: float) -> Iterator[Job]:
        return iter(self._jobs.values())

    def among(self, jobs: Sequence[Job], now: float) -> list[Job]:
        """Returns the jobs in the order of ``ranked``, as ``RanksSome`` asks."""
        return sorted(jobs, key=lambda job: self._keys[job.request_id])

    def slice_s(self, job: Job) -> float:
        return math.inf


@ORDERS.register("fcfs", steady=True)
def build_fcfs(context: ReplicaContext) -> Fcfs:
    """Runs requests first come, first served."""
    return Fcfs()
