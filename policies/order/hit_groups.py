"""Priority groups by prefix hits: the waiting queue of Preble's local scheduler (section 4.3)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from sortedcontainers import SortedKeyList

from core.decisions import Facts
from core.errors import InvalidValueError
from policies.interfaces import ORDERS, Order, ReplicaContext
from policies.job import Job


def quotas(num_groups: int, num_slots: int) -> list[int]:
    """Slots of a batch by group: group g has weight g + 1, shares are rounded down and the rest is nobody's yet."""
    weights = num_groups * (num_groups + 1) // 2
    return [num_slots * (group + 1) // weights for group in range(num_groups)]


class HitGroups(Order):
    """The more of a prompt is cached, the more slots of the batch its group has; first come, first served within it.

    Group g of P holds the jobs with a hit ratio from g/P on, all of a prompt in the highest. Slots that a group cannot
    use, and those lost to rounding, go to the highest group with somebody waiting. Running jobs fill their group's
    share, so a group whose share is free is served next however many wait in higher ones.

    ``add`` and ``remove`` are O(log n); a scheduling point is O(n), since every job's hits are looked at anew.

    Args:
        num_groups: P.
        num_slots: Jobs that execute together at most.
    """

    preemptive = False

    def __init__(self, num_slots: int, num_groups: int = 10) -> None:
        if num_groups < 1:
            raise InvalidValueError("num_groups", num_groups, "an integer >= 1")
        if num_slots < 1:
            raise InvalidValueError("num_slots", num_slots, "an integer >= 1")
        self._quotas = quotas(num_groups, num_slots)
        self._jobs: SortedKeyList[Job, tuple[tuple[int, float], float]] = SortedKeyList(key=_rank)
        self._members: set[Job] = set()

    def add(self, job: Job, now: float) -> None:
        """A job has arrived, or has lost its KV and comes back. O(log n)."""
        self._members.add(job)
        self._jobs.add(job)

    def remove(self, job: Job) -> None:
        """A job has ended or is gone; unknown ones are fine. O(log n)."""
        if job in self._members:
            self._members.remove(job)
            self._jobs.remove(job)

    def ranked(self, now: float) -> Iterator[Job]:
        """Running jobs, then the waiting ones: what the free slots take is in proportion to the groups' weights."""
        room = list(self._quotas)
        for job in self._jobs:
            if job.is_resident:
                room[self.group(job)] -= 1
                yield job
        waiting = (job for job in self._jobs if not job.is_resident)
        for _, equals in groupby(waiting, key=_urgency):
            yield from self._fill(equals, room)

    def group(self, job: Job) -> int:
        """floor(P * hit ratio), at most P - 1."""
        num_groups = len(self._quotas)
        return min(num_groups - 1, num_groups * job.cached_len // job.prompt_len)

    def explain(self, job: Job, now: float) -> Facts:
        """Its group, the slots that the group has, and the hits that put it there."""
        group = self.group(job)
        return {"hit_group": group, "group_slots": self._quotas[group], "cached_tokens": job.cached_len}

    def _fill(self, jobs: Iterator[Job], room: list[int]) -> Iterator[Job]:
        """Each group up to its ``room``, which shrinks by that, and then the rest; the highest group first."""
        groups: list[list[Job]] = [[] for _ in room]
        for job in jobs:
            groups[self.group(job)].append(job)
        rest: list[Job] = []
        for group in reversed(range(len(room))):
            num = min(max(0, room[group]), len(groups[group]))
            room[group] -= num
            yield from groups[group][:num]
            rest += groups[group][num:]
        yield from rest


def _urgency(job: Job) -> tuple[int, float]:
    return job.urgency


def _rank(job: Job) -> tuple[tuple[int, float], float]:
    return job.urgency, job.arrived_at


@ORDERS.register("hit-groups", uses_prefixes=True)
def build_hit_groups(context: ReplicaContext) -> HitGroups:
    """Groups by the share of the prompt that is cached."""
    return HitGroups(context.max_num_seqs)
