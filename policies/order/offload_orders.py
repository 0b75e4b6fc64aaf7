"""The question that a Scheduler asks its KVOffloadManager, the manager's answer, and the policy object between them.

The policy is the one that the Scheduler holds as well: built from the same parts, reading the same numbers. The
decision is the same on either side.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from farsight.core.errors import MessageError
from farsight.core.messages.kv import KVHolder, OffloadOrders, OffloadQuestion, QueueSize
from farsight.policies.interfaces import Job, KvMoves, KvPolicy, KvView, Order
from farsight.policies.order.gittins import DecodePrice, FloatArray, Gittins
from farsight.policies.order.skip_join_mlfq import Group, SkipJoinMlfq, Urgency
from farsight.policies.settings import PRIOR_CAPACITY, PRIOR_COST

_MOST_QUANTA = 700.0
"""The natural logarithm of the largest number is 709."""

_NO_PRICE = DecodePrice(PRIOR_COST, 1, PRIOR_CAPACITY)
"""A placeholder: ranks that a question tells are priced already."""


def ask(seq: int, view: KvView, order: Order, now: float) -> OffloadQuestion:
    """Draws up all that the policy would read. O(m log m + q) for m jobs in the view and q queues of the order."""
    jobs = [*view.running, *view.idle, *view.offloaded]
    sizes = list(order.groups()) if isinstance(order, SkipJoinMlfq) else []
    places = {each: i for i, each in enumerate(sorted({job.urgency for job in jobs} | {key[0] for key, _ in sizes}))}
    holders = {each.request_id: each for each in _holders(order, jobs, places, now)}

    def rows(part: Sequence[Job]) -> tuple[KVHolder, ...]:
        return tuple(holders[job.request_id] for job in part)

    return OffloadQuestion(
        seq=seq,
        running=rows(view.running),
        idle=rows(view.idle),
        offloaded=rows(view.offloaded),
        free=view.free,
        needed=view.needed,
        host_free=view.host_free,
        host_capacity=view.host_capacity,
        block_size=view.block_size,
        short=view.short,
        quantum_s=order.quantum_s(1) if isinstance(order, SkipJoinMlfq) else 0.0,
        queues=tuple(QueueSize(places[urgency], level, num_jobs) for (urgency, level), num_jobs in sizes),
    )


def _holders(order: Order, jobs: list[Job], places: dict[Urgency, int], now: float) -> Iterator[KVHolder]:
    if isinstance(order, SkipJoinMlfq):
        for job, (urgency, level), waits_since in order.standing(jobs):
            yield _holder(job, places[urgency], level, now - waits_since)
        return
    ranks = order.rank(jobs).tolist() if jobs and isinstance(order, Gittins) else [0.0] * len(jobs)
    for job, rank_s in zip(jobs, ranks, strict=True):
        yield _holder(job, places[job.urgency], rank_s=rank_s)


def _holder(job: Job, urgency: int, level: int = 0, waited_s: float = 0.0, rank_s: float = 0.0) -> KVHolder:
    lengths = job.known_len, job.computed_len, job.host_len
    return KVHolder(job.request_id, job.arrived_at, *lengths, urgency, level, waited_s, rank_s)


class ToldQueues(SkipJoinMlfq):
    """The MLFQ of a Scheduler as its question tells it: queues and waiting times, to be read and not to be run."""

    def __init__(self, like: SkipJoinMlfq) -> None:
        super().__init__(like.cost, like.config, like.rules)
        self._told: dict[str, KVHolder] = {}
        self._sizes: list[tuple[Group, int]] = []

    def tell(self, question: OffloadQuestion, holders: dict[str, KVHolder]) -> None:
        """Takes over the queues and holders of this question.

        Raises:
            MessageError: A level is so low that its quantum would be no finite number.
        """
        levels = [each.level for each in holders.values()] + [each.level for each in question.queues]
        lowest = max(levels, default=0)
        if lowest * math.log(self.config.quantum_ratio) > _MOST_QUANTA:
            raise MessageError("OffloadQuestion.level", lowest, "a level of a finite quantum")
        if question.quantum_s != self._first_quantum_s:
            self._first_quantum_s, self._quanta_s, self._above_s = question.quantum_s, [], [0.0]
        self._told = holders
        self._sizes = [((_urgency(each.urgency), each.level), each.num_jobs) for each in question.queues]

    def standing(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Group, float]]:
        """Yields each job with its queue and the start of its wait; instant 0 is that of the question."""
        for job in jobs:
            told = self._told[job.request_id]
            yield job, (job.urgency, told.level), -told.waited_s

    def groups(self) -> Iterator[tuple[Group, int]]:
        return iter(self._sizes)

    def num_in_top(self, num_levels: int) -> int:
        return sum(num_jobs for (_, level), num_jobs in self._sizes if level <= num_levels)


class ToldRanks(Gittins):
    """The ranks of a Scheduler's order as its question tells them."""

    def __init__(self) -> None:
        super().__init__(_NO_PRICE)
        self._told: dict[str, KVHolder] = {}

    def tell(self, question: OffloadQuestion, holders: dict[str, KVHolder]) -> None:
        """Takes over the ranks of this question."""
        self._told = holders

    def rank(self, jobs: Sequence[Job]) -> FloatArray:
        return np.array([self._told[job.request_id].rank_s for job in jobs], np.float64)


def told(order: Order) -> ToldQueues | ToldRanks | None:
    """Returns this order's stand-in at the KVOffloadManager; None if no KV policy of ours reads the order."""
    if isinstance(order, SkipJoinMlfq):
        return ToldQueues(order)
    return ToldRanks() if isinstance(order, Gittins) else None


class OffloadDecider:
    """Answers a Scheduler's questions. No state is kept between questions, so any decider may answer any of them.

    Args:
        policy: Decides; reads ``order``.
        order: As the questions tell it; None if the policy reads no order.
    """

    def __init__(self, policy: KvPolicy, order: ToldQueues | ToldRanks | None) -> None:
        self._policy, self._order = policy, order

    def decide(self, question: OffloadQuestion) -> OffloadOrders:
        """Answers a question. Costs as much as the policy's ``moves``, and O(m) for m jobs in the question."""
        if self._order is not None:
            rows = (*question.running, *question.idle, *question.offloaded)
            self._order.tell(question, {each.request_id: each for each in rows})
        view = _view(question)
        moves = self._policy.moves(view, 0.0)
        return orders_of(question.seq, moves, self._policy.idle_target(view))


def orders_of(seq: int, moves: KvMoves, idle_target: int = 0) -> OffloadOrders:
    """Returns the moves as a message, by request id."""
    out, drop, back = (tuple(job.request_id for job in part) for part in (moves.offload, moves.drop, moves.upload))
    return OffloadOrders(seq, out, drop, back, moves.break_off, idle_target)


def _view(question: OffloadQuestion) -> KvView:
    return KvView(
        running=list(map(_job, question.running)),
        idle=list(map(_job, question.idle)),
        offloaded=list(map(_job, question.offloaded)),
        free=question.free,
        needed=question.needed,
        host_free=question.host_free,
        host_capacity=question.host_capacity,
        block_size=question.block_size,
        short=question.short,
    )


def _job(told: KVHolder) -> Job:
    job = Job(told.request_id, told.arrived_at, told.known_len, 1, priority=told.urgency)
    job.computed_len, job.host_len = told.computed_len, told.host_len
    return job


def _urgency(place: int) -> Urgency:
    return place, math.inf
