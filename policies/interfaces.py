"""The parts that a replica's scheduler is composed of, and what they may see and answer.

Every part is a plain object without a clock and without randomness of its own: instants come as arguments, a
``numpy.random.Generator`` at construction. All of them work on ``Job``s, which they read and never write. A base class
has a harmless default for everything that a part need not care about; what has no default is abstract.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from core.costs import StepCost
from core.decisions import Facts
from core.errors import IntegrityError
from policies.job import Job
from policies.parts import Parts
from policies.settings import PolicySettings

OrderT = TypeVar("OrderT", bound="Order")


class Explains:
    """A part that may say from which numbers it decides."""

    def explain(self, job: Job, now: float) -> Facts:
        """The numbers behind the decision that was just taken about the job; changes nothing. None by default.

        Asked when a job is admitted, refused, preempted, moved or changes its level, not at every step.
        """
        return {}


class Order(Explains, ABC):
    """Which job goes first on a replica in continuous batching.

    Thousands of jobs may wait: what an order does at a scheduling point is bounded by what has changed and by how many
    jobs are taken, apart from a few numpy operations over all jobs.

    Attributes:
        preemptive: Whether a waiting job may take the place of a running one of lower rank. Where not, running jobs
            come before all waiting ones, in order of admission, and ``ranked`` decides among the waiting.
        on_move: Set by the scheduler: an order that moves jobs by itself calls it with the job, ``promoted`` or
            ``demoted``, and the instant. None if it is not listened to.
    """

    preemptive: bool = False
    on_move: Callable[[Job, str, float], None] | None = None

    @abstractmethod
    def add(self, job: Job, now: float) -> None:
        """A job has arrived. It stays until it ends, whether it runs, waits or has lost its KV."""

    @abstractmethod
    def remove(self, job: Job) -> None:
        """A job has ended or is gone; unknown ones are fine."""

    @abstractmethod
    def ranked(self, now: float) -> Iterator[Job]:
        """All jobs, best first, lazily: taking n of them costs n. The order does not change meanwhile."""

    def foreseen(self, job: Job) -> None:
        """The job's ``forecast``, which it may have lacked until now, is another one."""

    def changed(self, job: Job) -> None:
        """What can be seen of the job, beside its forecast, may be different: its lengths, where its KV is, what is
        cached of its prompt. Said after each change, before ``ran``; unknown jobs are fine.
        """

    def price(self, cost: StepCost, capacity: int) -> None:
        """What steps cost here and how many KV tokens there are; said at the start and whenever it has changed."""

    def learn(self, job: Job, *, censored: bool) -> None:
        """A job that was removed had reached its end; ``censored``: it might have gone on."""

    def ran(self, job: Job, duration_s: float, now: float) -> None:
        """The job took part in steps of so many seconds in all since this was last said; it is up to date."""

    def refresh(self, now: float) -> None:
        """A scheduling point begins: does what is due (promotions, ranks that have changed)."""

    def slice_s(self, job: Job) -> float:
        """Seconds that the job may run before this order wants to look at it again; infinity for no bound."""
        return math.inf


@runtime_checkable
class RanksSome(Protocol):
    """A preemptive order that ranks some of its jobs without going through the others."""

    def among(self, jobs: Sequence[Job], now: float) -> list[Job]:
        """These jobs of the order, as ``ranked`` would give them. O(k log k) for k of them."""
        ...


class Admission(Explains, ABC):
    """Whether a job may become resident. One scheduling point: ``begin``, then ``admits`` and ``add`` by turns.

    Attributes:
        max_skips: Refused jobs that others of lower rank may overtake at one scheduling point; 0: none is overtaken.
    """

    max_skips: int = 0

    @abstractmethod
    def begin(self, running: Sequence[Job], capacity: int) -> None:
        """A scheduling point begins.

        Args:
            running: Jobs that go on running whatever is decided.
            capacity: KV tokens that they and those admitted may fill together, now and later.
        """

    @abstractmethod
    def admits(self, job: Job) -> bool:
        """Whether the job fits beside them and those added since. Without any, whatever fits at all is admitted."""

    @abstractmethod
    def add(self, job: Job) -> None:
        """From now on the job counts among the running."""

    def reserve(self, capacity: int) -> int:
        """KV tokens that starts leave free for the growth of running jobs."""
        return 0

    def learn(self, output_len: int, *, censored: bool) -> None:
        """A job has ended; ``censored``: by its limit or from outside, it might have gone on."""


@dataclass(frozen=True, slots=True)
class KvView:
    """Where the KV of a replica's jobs is at one scheduling point; tokens.

    Attributes:
        running: Jobs that are to execute next, best first, newcomers among them.
        idle: Jobs with KV on the device that are not to execute next.
        offloaded: Jobs with KV on the host only that are not to execute next.
        free: Device tokens that nobody holds now.
        needed: Device tokens that ``running`` lack for their next step (newcomers: for all their known tokens).
        host_free: Host tokens that nobody holds.
        host_capacity: Host tokens in all; 0 where there is no host pool.
        block_size: Memory goes in units of so many tokens.
        short: Device tokens that the worker said ``running`` lack to go on, part of ``needed``.
    """

    running: Sequence[Job]
    idle: Sequence[Job]
    offloaded: Sequence[Job]
    free: int
    needed: int
    host_free: int
    host_capacity: int
    block_size: int = 1
    short: int = 0


@dataclass(frozen=True, slots=True)
class KvMoves:
    """What is to move, in this order.

    Attributes:
        break_off: Nothing of the kind: all that is here gives up its memory and its place, and goes back to the queue
            it came from.
    """

    offload: tuple[Job, ...] = ()
    drop: tuple[Job, ...] = ()
    upload: tuple[Job, ...] = ()
    break_off: bool = False


class KvPolicy(Explains, ABC):
    """What becomes of KV when memory is short, and ahead of that.

    Attributes:
        evicts: Whether KV of jobs that do not execute makes way for a job of higher rank. Where not, the newcomer
            waits (the Defer baseline) and only jobs that cannot go on otherwise give way.
        swaps: Whether KV is moved to the host rather than dropped while there is room.
        watches: Whether it is asked at every scheduling point, and not only when the worker is short of memory or where
            the order is preemptive.
    """

    evicts: bool = False
    swaps: bool = False
    watches: bool = False

    @abstractmethod
    def moves(self, view: KvView, now: float) -> KvMoves:
        """What to move at this scheduling point; a job is named once at most."""

    def may_start(self, view: KvView) -> bool:
        """Whether jobs without any KV may start; no where their KV could not be put anywhere later."""
        return True


@dataclass(frozen=True, slots=True)
class ReplicaPolicies:
    """What decides on one replica."""

    order: Order
    admission: Admission
    kv: KvPolicy


@dataclass(frozen=True, slots=True)
class ReplicaContext:
    """What an order, an admission or a KV policy is built from.

    Attributes:
        max_num_seqs: Requests that the replica runs at once at most.
        order: The order that they are composed with; None while the order itself is built.
    """

    settings: PolicySettings
    max_num_seqs: int
    order: Order | None = None

    def order_as(self, kind: type[OrderT]) -> OrderT:
        """The order, for a part that is registered with ``needs``.

        Raises:
            IntegrityError: The order is of another kind: the part is registered with another name in ``needs``.
        """
        if not isinstance(self.order, kind):
            raise IntegrityError(f"a part that needs {kind.__name__} was composed with {type(self.order).__name__}")
        return self.order


ORDERS: Parts[Order, ReplicaContext] = Parts("scheduler.order")
"""Orders by the names that presets and ``[scheduler] order`` use."""

ADMISSIONS: Parts[Admission, ReplicaContext] = Parts("scheduler.admission")
"""Admissions by the names that presets and ``[scheduler] admission`` use."""

KV_POLICIES: Parts[KvPolicy, ReplicaContext] = Parts("scheduler.kv")
"""KV policies by the names that presets and ``[scheduler] kv`` use."""
