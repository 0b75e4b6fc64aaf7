"""Priority groups by prefix hits: the waiting queue of Preble's local scheduler (section 4.3)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from sortedcontainers import SortedDict

from farsight.core.decisions import Facts
from farsight.core.errors import IntegrityError, InvalidValueError
from farsight.policies.interfaces import ORDERS, Job, Order, ReplicaContext

_Urgency = tuple[int, float]
_Turn = tuple[float, int]
"""(arrival, number of its addition): first come, first served."""


def quotas(num_groups: int, num_slots: int) -> list[int]:
    """Returns a batch's slots by group: group g has weight g + 1, shares are rounded down, the rest is unassigned."""
    weights = num_groups * (num_groups + 1) // 2
    return [num_slots * (group + 1) // weights for group in range(num_groups)]


@dataclass(slots=True)
class _Place:
    """The place of a job.

    Attributes:
        is_resident: Whether the job runs: it is then in no group's queue and takes one of its group's slots.
    """

    urgency: _Urgency
    turn: _Turn
    group: int
    is_resident: bool


class HitGroups(Order):
    """The more of a prompt is cached, the more slots of the batch its group has; first come, first served within it.

    Group g of P holds the jobs with a hit ratio from g/P on, all of a prompt in the highest. Slots that a group cannot
    use, and those lost to rounding, go to the highest group with a waiting job. Running jobs fill their group's
    share, so a group whose share is free is served next however many wait in higher ones.

    ``add``, ``remove`` and a change of a job's group are O(log n); the first k of ``ranked`` O(k + groups).

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
        self._places: dict[Job, _Place] = {}
        self._running: SortedDict[tuple[_Urgency, _Turn], Job] = SortedDict()
        self._num_running = [0] * num_groups
        self._waiting: SortedDict[_Urgency, list[SortedDict[_Turn, Job]]] = SortedDict()
        self._numbers = itertools.count()

    def add(self, job: Job, now: float) -> None:
        """Adds a job that has arrived, or has lost its KV and comes back. O(log n)."""
        turn = job.arrived_at, next(self._numbers)
        place = self._places[job] = _Place(job.urgency, turn, self.group(job), job.is_resident)
        self._put_in(job, place)

    def remove(self, job: Job) -> None:
        """Removes a job that has ended or is gone; unknown jobs are ignored. O(log n)."""
        place = self._places.pop(job, None)
        if place is not None:
            self._take_out(place)

    def changed(self, job: Job) -> None:
        """Moves a job that has begun or ceased to run, or has other hits. O(log n) if its place changes, else O(1)."""
        place = self._places.get(job)
        if place is None:
            return
        group, is_resident = self.group(job), job.is_resident
        if (group, is_resident) != (place.group, place.is_resident):
            self._take_out(place)
            place.group, place.is_resident = group, is_resident
            self._put_in(job, place)

    def ranked(self, now: float) -> Iterator[Job]:
        """Yields running jobs, then waiting ones: free slots are taken in proportion to the groups' weights."""
        room = [quota - num for quota, num in zip(self._quotas, self._num_running, strict=True)]
        yield from self._running.values()
        for groups in self._waiting.values():
            yield from _fill(groups, room)

    def group(self, job: Job) -> int:
        """Returns floor(P * hit ratio), at most P - 1."""
        num_groups = len(self._quotas)
        return min(num_groups - 1, num_groups * job.cached_len // job.prompt_len)

    def explain(self, job: Job, now: float) -> Facts:
        """Returns the job's group, the slots that the group has, and the cached prompt tokens that decide the group."""
        group = self.group(job)
        return {"hit_group": group, "group_slots": self._quotas[group], "cached_tokens": job.cached_len}

    def _put_in(self, job: Job, place: _Place) -> None:
        if place.is_resident:
            self._running[place.urgency, place.turn] = job
            self._num_running[place.group] += 1
            return
        groups = self._waiting.get(place.urgency)
        if groups is None:
            groups = self._waiting[place.urgency] = [SortedDict() for _ in self._quotas]
        groups[place.group][place.turn] = job

    def _take_out(self, place: _Place) -> None:
        if place.is_resident:
            del self._running[place.urgency, place.turn]
            self._num_running[place.group] -= 1
            return
        groups = self._waiting[place.urgency]
        del groups[place.group][place.turn]
        if not any(groups):
            del self._waiting[place.urgency]

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every job stands where its hits and its KV put it."""
        for job, place in self._places.items():
            if (place.group, place.is_resident) != (self.group(job), job.is_resident):
                raise IntegrityError(f"{job.request_id} has changed and stands where it stood")
        if len(self._places) != sum(1 for _ in self.ranked(0.0)):
            raise IntegrityError("jobs and places disagree")


def _fill(groups: list[SortedDict[_Turn, Job]], room: list[int]) -> Iterator[Job]:
    """Yields up to ``room`` jobs of each group, lowering ``room``, then the rest; the highest group first."""
    served = [min(max(0, num), len(group)) for num, group in zip(room, groups, strict=True)]
    highest_first = range(len(groups) - 1, -1, -1)
    for index in highest_first:
        room[index] -= served[index]
        yield from itertools.islice(groups[index].values(), served[index])
    for index in highest_first:
        group = groups[index]
        yield from (group[turn] for turn in group.islice(served[index]))


@ORDERS.register("hit-groups", uses_prefixes=True)
def build_hit_groups(context: ReplicaContext) -> HitGroups:
    """Groups jobs by the share of the prompt that is cached."""
    return HitGroups(context.max_num_seqs)
