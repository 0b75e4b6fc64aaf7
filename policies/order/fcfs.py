"""First come, first served: the order of Orca and vLLM, and the baseline of every paper here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sortedcontainers import SortedDict

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

    def ranked(self, now: float) -> Iterator[Job]:
        return iter(self._jobs.values())

    def among(self, jobs: Sequence[Job], now: float) -> list[Job]:
        """Returns the jobs in the order of ``ranked``, as ``RanksSome`` asks."""
        return sorted(jobs, key=lambda job: self._keys[job.request_id])


@ORDERS.register("fcfs", steady=True)
def build_fcfs(context: ReplicaContext) -> Fcfs:
    """Runs requests first come, first served."""
    return Fcfs()
