"""Skip-join MLFQ (FastServe, section 4.1): the job that has run least goes first, and no long prefill gets in the way.

Levels 1, 2, ... with quanta q_1 * ratio^(level-1). A job joins at the first level whose quantum holds its first
iteration, sinks when it has used its quantum up, and comes back to level 1 when it has waited too long.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from sortedcontainers import SortedDict

from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.costs import StepCost
from farsight.core.decisions import Facts
from farsight.core.errors import IntegrityError
from farsight.policies.interfaces import ORDERS, Job, Order, ReplicaContext
from farsight.policies.settings import MlfqRules

Urgency = tuple[int, float]
Group = tuple[Urgency, int]
"""(urgency, level): one queue."""
_Key = tuple[Urgency, bool, int, int]
"""(urgency, whether its prefill is beyond the budget, level, ticket)."""
_MID_ITERATION = 0

_LEAST_LEFT = 1e-6
"""Share of a quantum that counts as nothing where iterations are cut off.

A job attains its quantum in parts, and rounding may leave 1e-17 s of it, which no iteration fits into and no clock
tells from none: the job would stand still."""

PROMOTIONS_AT_ONCE = 16
"""Jobs promoted at one scheduling point at most: about 0.3 ms. The others follow at the next scheduling points."""


@dataclass(slots=True, eq=False)
class _Place:
    """The place of a job; times in seconds."""

    job: Job
    urgency: Urgency
    level: int
    ticket: int
    allotment_s: float
    waits_since: float
    attained_s: float = 0.0
    is_mid_iteration: bool = False
    lacks_prefill: bool = True

    def key(self, *, is_late: bool = False) -> _Key:
        return self.urgency, is_late, _MID_ITERATION if self.is_mid_iteration else self.level, self.ticket

    @property
    def group(self) -> Group:
        return self.urgency, self.level


class SkipJoinMlfq(Order):
    """An ``Order`` by (priority, deadline, level, place in the queue).

    ``add``, ``remove`` and a change of level cost O(log n), ``ran`` O(1) otherwise, ``refresh`` O(promoted log n), the
    first k of ``ranked`` O(k + log n). Instants never go back.

    Attributes:
        cost: Prices first and next iterations.
        config: Quanta, levels, the starvation limit and the variant of the MLFQ, as a server sets them.
        rules: Rules that no server sets.
        on_move: As in ``Order``.
    """

    preemptive = True

    def __init__(self, cost: StepCost, config: SchedulerConfig | None = None, rules: MlfqRules | None = None) -> None:
        self.cost = cost
        self.config = config or SchedulerConfig()
        self.rules = rules or MlfqRules()
        self.cuts_off = self.config.mlfq == "preemption"
        self._skip_join = self.config.mlfq == "skip-join"
        self._first_quantum_s = self.config.quantum_s
        self._quanta_s: list[float] = []
        self._above_s = [0.0]
        self._places: dict[str, _Place] = {}
        self._prefills: SortedDict[_Key, _Place] = SortedDict()
        self._decodes: SortedDict[_Key, _Place] = SortedDict()
        self._group_sizes: SortedDict[Group, int] = SortedDict()
        self._level_sizes: Counter[int] = Counter()
        self._timers: OrderedDict[str, _Place] = OrderedDict()
        self._tickets = itertools.count(1)
        self._points = 0
        self._left_starving = False
        self.on_move: Callable[[Job, str, float], None] | None = None

    def add(self, job: Job, now: float) -> None:
        """Adds the job at the tail of the first level whose quantum holds its next iteration (getHighestPriority)."""
        level = self.level_for(self.next_iteration_s(job)) if self._skip_join else 1
        place = _Place(job, job.urgency, level, next(self._tickets), self.quantum_s(level), now)
        self._places[job.request_id] = place
        self._insert(place)

    def remove(self, job: Job) -> None:
        place = self._places.pop(job.request_id, None)
        if place is not None:
            self._take_out(place)

    def price(self, cost: StepCost, capacity: int) -> None:
        """Sets the step cost; jobs keep their levels and what is left of their quanta."""
        self.cost = cost
        if self.rules.follows_cost:
            self._first_quantum_s = max(self.config.quantum_s, cost.decode_s(1))
            self._quanta_s, self._above_s = [], [0.0]

    def ran(self, job: Job, duration_s: float, now: float) -> None:
        """Counts the time of the whole batch; a job that has used its quantum up sinks, the others keep their places.

        A prefill in several steps is one iteration: until it ends the job goes before all of its urgency and does not
        sink, since taking it out would leave KV that is of no use.
        """
        place = self._places[job.request_id]
        place.attained_s += duration_s
        place.waits_since = now
        if place.level > 1:
            self._timers.move_to_end(job.request_id)
        lacks_prefill = _has_prefill_left(job)
        is_mid_iteration = lacks_prefill and not self.cuts_off
        if not is_mid_iteration and self._is_used_up(place):
            self._demote(place, now)
        elif is_mid_iteration != place.is_mid_iteration or lacks_prefill != place.lacks_prefill:
            self._take_out(place)
            place.is_mid_iteration = is_mid_iteration
            self._insert(place)

    def refresh(self, now: float) -> None:
        """Promotes starving jobs: those below level 1 that neither ran nor were promoted for ``starve_limit_s``."""
        self._points += 1
        if self._points % self.rules.starve_check_every and not self._left_starving:
            return
        self._left_starving = False
        for num_promoted in itertools.count():
            place = next(iter(self._timers.values()), None)
            if place is None or now - place.waits_since < self.config.starve_limit_s:
                return
            if num_promoted == PROMOTIONS_AT_ONCE:
                self._left_starving = True
                return
            self._promote(place, now)

    def ranked(self, now: float) -> Iterator[Job]:
        """Yields jobs queue by queue, head to tail; within an urgency, prefills beyond ``max_prompt_tokens`` come last.

        A job that has lost its KV counts as a decoding job until its new prefill begins.
        """
        return _merged(self._budgeted(), iter(self._decodes.items()))

    def among(self, jobs: Sequence[Job], now: float) -> list[Job]:
        """Returns the jobs in the order of ``ranked``, as ``RanksSome`` asks."""
        places = [self._places[job.request_id] for job in jobs]
        early = {place.ticket for place in self._early()}
        keyed = [(each.key(is_late=each.lacks_prefill and each.ticket not in early), each.job) for each in places]
        return [job for _, job in sorted(keyed, key=_first)]

    def slice_s(self, job: Job) -> float:
        """Returns the seconds left of the job's quantum; an iteration that has begun goes on beyond, unless cut off."""
        place = self._places[job.request_id]
        return max(0.0, place.allotment_s - place.attained_s)

    def next_iteration_s(self, job: Job) -> float:
        """Returns the seconds of the job's next iteration alone: a prefill (again after a drop) or one token."""
        if _has_prefill_left(job):
            missing = max(1, job.missing_len)
            return self.cost.prefill_s(missing, job.known_len - missing)
        return self.cost.decode_s(job.known_len)

    def quantum_s(self, level: int) -> float:
        """Returns q_1 * ratio^(level-1) seconds, level 1 being the highest; infinity at the last of limited levels."""
        if level == self.config.num_levels:
            return math.inf
        while len(self._quanta_s) < level:
            self._add_level()
        return self._quanta_s[level - 1]

    def above_s(self, level: int) -> float:
        """Returns the sum of the quanta of all levels above this one, in seconds."""
        while len(self._above_s) < level:
            self._add_level()
        return self._above_s[level - 1]

    def level_for(self, iteration_s: float) -> int:
        """Returns the first level whose quantum holds an iteration of ``iteration_s``; the last level if none does."""
        while not self._quanta_s or self._quanta_s[-1] <= iteration_s:
            self._add_level()
        find = bisect_right if self.rules.strict else bisect_left
        return self._bounded(find(self._quanta_s, iteration_s) + 1)

    def level(self, job: Job) -> int:
        return self._places[job.request_id].level

    def waited_s(self, job: Job, now: float) -> float:
        """Returns the seconds since the job ran, was promoted or came, whichever was last."""
        return now - self._places[job.request_id].waits_since

    def standing(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Group, float]]:
        """Yields each job with its queue and the instant from which ``waited_s`` counts."""
        places = self._places
        for job in jobs:
            place = places[job.request_id]
            yield job, (place.urgency, place.level), place.waits_since

    def explain(self, job: Job, now: float) -> Facts:
        """Returns the job's level, its quantum and how much of the quantum it has used, in seconds."""
        place = self._places[job.request_id]
        return {"level": place.level, "quantum_s": place.allotment_s, "attained_s": place.attained_s}

    def groups(self) -> Iterator[tuple[Group, int]]:
        """Yields ((urgency, level), number of jobs there), highest first, without the empty queues."""
        return iter(self._group_sizes.items())

    def num_in_top(self, num_levels: int) -> int:
        """Returns the number of jobs in the ``num_levels`` highest levels. O(num_levels)."""
        return sum(self._level_sizes[level] for level in range(1, num_levels + 1))

    def check_integrity(self) -> None:
        """Raises IntegrityError unless queue, counts, timers and levels agree."""
        places = self._places.values()
        for queue, lacks_prefill in ((self._prefills, True), (self._decodes, False)):
            wanted = ((each.key(), each) for each in places if each.lacks_prefill is lacks_prefill)
            if list(queue.items()) != sorted(wanted, key=_first):
                raise IntegrityError("the queue does not hold every job where it stands")
        if dict(self._group_sizes) != Counter(each.group for each in places):
            raise IntegrityError("the numbers of jobs by queue are wrong")
        if +self._level_sizes != Counter(each.level for each in places):
            raise IntegrityError("the numbers of jobs by level are wrong")
        if self._timers.keys() != {each.job.request_id for each in places if each.level > 1}:
            raise IntegrityError("timers do not run for exactly the jobs below level 1")
        waits = [each.waits_since for each in self._timers.values()]
        if waits != sorted(waits):
            raise IntegrityError("timers are out of order")
        for each in places:
            if self._bounded(each.level) != each.level or each.level < 1:
                raise IntegrityError(f"{each.job.request_id}: there is no level {each.level}")
            if not each.is_mid_iteration and self._is_used_up(each):
                raise IntegrityError(f"{each.job.request_id}: has used its quantum up and did not sink")

    def _budgeted(self) -> Iterator[tuple[_Key, _Place]]:
        """Yields the jobs that lack a prefill, ascending."""
        num_early = 0
        for place in self._early():
            num_early += 1
            yield place.key(), place
        for key in self._prefills.islice(num_early):
            place = self._prefills[key]
            yield place.key(is_late=True), place

    def _early(self) -> Iterator[_Place]:
        """Yields the first jobs that lack a prefill, until these make up ``max_prompt_tokens``."""
        left = self.rules.max_prompt_tokens
        for place in self._prefills.values():
            if left <= 0:
                return
            left -= place.job.missing_len
            yield place

    def _is_used_up(self, place: _Place) -> bool:
        if self.cuts_off:
            return place.attained_s >= (1 - _LEAST_LEFT) * place.allotment_s
        if self.rules.strict:
            return place.attained_s > place.allotment_s
        return place.attained_s >= place.allotment_s

    def _demote(self, place: _Place, now: float) -> None:
        """Moves the job at least one level down, to where its next iteration fits (getDemotionPriority)."""
        level = self._bounded(place.level + 1)
        if self._skip_join:
            level = max(level, self.level_for(self.next_iteration_s(place.job)))
        ticket = next(self._tickets)
        self._move(place, level, -ticket if self.rules.demotes_to_front else ticket, self.quantum_s(level))
        self._tell(place, "demoted", now)

    def _promote(self, place: _Place, now: float) -> None:
        """Moves the job to the tail of level 1, with time for one whole iteration.

        The paper gives the extra quantum "if its next iteration time is less than the quantum of Q_1", where none is
        needed; its purpose, the next iteration without preemption, asks for the longer of the two.
        """
        place.waits_since = now
        allotment_s = max(self.quantum_s(1), self.next_iteration_s(place.job))
        self._move(place, 1, next(self._tickets), allotment_s)
        self._tell(place, "promoted", now)

    def _tell(self, place: _Place, kind: str, now: float) -> None:
        if self.on_move is not None:
            self.on_move(place.job, kind, now)

    def _move(self, place: _Place, level: int, ticket: int, allotment_s: float) -> None:
        self._take_out(place)
        place.level, place.ticket, place.allotment_s = level, ticket, allotment_s
        place.attained_s, place.is_mid_iteration = 0.0, False
        self._insert(place)

    def _insert(self, place: _Place) -> None:
        """Inserts the job; its timer, if it is below level 1, becomes the newest: the job has just come or run."""
        place.lacks_prefill = _has_prefill_left(place.job)
        self._queue_of(place)[place.key()] = place
        self._group_sizes[place.group] = self._group_sizes.get(place.group, 0) + 1
        self._level_sizes[place.level] += 1
        if place.level > 1:
            self._timers[place.job.request_id] = place

    def _take_out(self, place: _Place) -> None:
        del self._queue_of(place)[place.key()]
        self._group_sizes[place.group] -= 1
        if not self._group_sizes[place.group]:
            del self._group_sizes[place.group]
        self._level_sizes[place.level] -= 1
        self._timers.pop(place.job.request_id, None)

    def _queue_of(self, place: _Place) -> SortedDict[_Key, _Place]:
        return self._prefills if place.lacks_prefill else self._decodes

    def _add_level(self) -> None:
        quantum_s = self._first_quantum_s * self.config.quantum_ratio ** len(self._quanta_s)
        self._quanta_s.append(quantum_s)
        self._above_s.append(self._above_s[-1] + quantum_s)

    def _bounded(self, level: int) -> int:
        return min(level, self.config.num_levels) if self.config.num_levels else level


def _has_prefill_left(job: Job) -> bool:
    return job.output_len == 0 or job.missing_len > 1


def _merged(first: Iterator[tuple[_Key, _Place]], second: Iterator[tuple[_Key, _Place]]) -> Iterator[Job]:
    """Yields the jobs of both rising iterators in rising order, lazily. ``heapq.merge`` takes three times as long."""
    one, other = next(first, None), next(second, None)
    while one is not None and other is not None:
        if one[0] <= other[0]:
            yield one[1].job
            one = next(first, None)
        else:
            yield other[1].job
            other = next(second, None)
    for rest, source in ((one, first), (other, second)):
        if rest is not None:
            yield rest[1].job
            yield from (place.job for _, place in source)


def _first(item: tuple[_Key, object]) -> _Key:
    return item[0]


@ORDERS.register("skip-join-mlfq")
def build_skip_join_mlfq(context: ReplicaContext) -> SkipJoinMlfq:
    """Ranks by a skip-join multi-level feedback queue."""
    settings = context.settings
    return SkipJoinMlfq(settings.cost, settings.scheduler, settings.mlfq)
