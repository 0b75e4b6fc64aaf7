"""Interfaces of the parts that a replica's scheduler is composed of.

Every part is a plain object without a clock and without randomness of its own: instants come as arguments, a
``numpy.random.Generator`` at construction. All parts read ``Job``s and never write them. A base class has a harmless
default for every optional method; methods without a default are abstract.
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
    """A part that can report the numbers behind its decisions."""

    def explain(self, job: Job, now: float) -> Facts:
        """The numbers behind the latest decision about the job, without side effects. Empty by default.

        The scheduler calls it when it admits, refuses, preempts or moves a job or changes its level, not at every step.
        """
        return {}


class Order(Explains, ABC):
    """Ranks the jobs of a replica in continuous batching.

    Thousands of jobs may wait, so the work at a scheduling point must be bounded by the number of changed and taken
    jobs, apart from a few numpy operations over all jobs.

    Attributes:
        preemptive: Whether a waiting job may replace a running job of lower rank. If not, running jobs come before
        all waiting ones, in order of admission, and ``ranked`` decides among the waiting jobs.
        on_move: A callback that the scheduler sets: an order that moves jobs between levels calls it with the job,
        ``promoted`` or ``demoted``, and the instant. None if the scheduler does not need it.
    """

    preemptive: bool = False
    on_move: Callable[[Job, str, float], None] | None = None

    @abstractmethod
    def add(self, job: Job, now: float) -> None:
        """Adds a job that has arrived. It stays until it ends, whether it runs, waits or has lost its KV."""

    @abstractmethod
    def remove(self, job: Job) -> None:
        """Removes a job that has ended or was aborted; unknown jobs are ignored."""

    @abstractmethod
    def ranked(self, now: float) -> Iterator[Job]:
        """Yields all jobs, best first, lazily: n jobs cost O(n). Callers do not change the order meanwhile."""

    def foreseen(self, job: Job) -> None:
        """The job has a new ``forecast``, perhaps its first."""

    def changed(self, job: Job) -> None:
        """The job's lengths, the location of its KV or its cached prompt tokens may have changed. Called after each
        change, before ``ran``; unknown jobs are ignored.
        """

    def price(self, cost: StepCost, capacity: int) -> None:
        """Sets the step cost and the KV capacity in tokens; called at the start and after each change."""

    def learn(self, job: Job, *, censored: bool) -> None:
        """A removed job had ended; ``censored``: it was cut off, so its natural length is unknown."""

    def ran(self, job: Job, duration_s: float, now: float) -> None:
        """The job took part in steps of this many seconds since the last call; its state is up to date."""

    def refresh(self, now: float) -> None:
        """Begins a scheduling point: applies due promotions and rank changes."""

    def slice_s(self, job: Job) -> float:
        """Seconds that the job may run before this order must see it again; infinity for no bound."""
        return math.inf


@runtime_checkable
class RanksSome(Protocol):
    """A preemptive order that can rank a subset of its jobs without the others."""

    def among(self, jobs: Sequence[Job], now: float) -> list[Job]:
        """These jobs in the order of ``ranked``. O(k log k) for k jobs."""
        ...


class Admission(Explains, ABC):
    """Decides whether a job may become resident. Calls per scheduling point: ``begin``, then ``admits`` and ``add``.

    Attributes:
        max_skips: Most refused jobs that jobs of lower rank may overtake at one scheduling point; 0: none.
    """

    max_skips: int = 0

    @abstractmethod
    def begin(self, running: Sequence[Job], capacity: int) -> None:
        """Begins a scheduling point.

        Args:
            running: Jobs that continue to run whatever is decided.
            capacity: KV tokens that running and admitted jobs may fill together, now and later.
        """

    @abstractmethod
    def admits(self, job: Job) -> bool:
        """Whether the job fits beside the running and the added jobs; with none, any job that fits alone is fine."""

    @abstractmethod
    def add(self, job: Job) -> None:
        """Counts the job as running from now on."""

    def reserve(self, capacity: int) -> int:
        """KV tokens that admission keeps free for the growth of running jobs."""
        return 0

    def learn(self, output_len: int, *, censored: bool) -> None:
        """A job has ended; ``censored``: its limit or an abort cut it off, so its natural length is unknown."""


@dataclass(frozen=True, slots=True)
class KvView:
    """The location of the KV of a replica's jobs at one scheduling point; in tokens.

    Attributes:
        running: Jobs that execute next, best first, including new ones.
        idle: Jobs with KV on the device that do not execute next.
        offloaded: Jobs with KV on the host only that do not execute next.
        free: Unused device tokens.
        needed: Device tokens that ``running`` lack for their next step (new jobs: for all their known tokens).
        host_free: Unused host tokens.
        host_capacity: All host tokens; 0 without a host pool.
        block_size: Tokens per KV block, the unit of allocation.
        short: Device tokens that ``running`` lack by the worker's report, part of ``needed``.
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
    """The KV moves to make, in this order.

    Attributes:
        break_off: No moves: all jobs of the replica give up their memory and slots and return to the central queue.
    """

    offload: tuple[Job, ...] = ()
    drop: tuple[Job, ...] = ()
    upload: tuple[Job, ...] = ()
    break_off: bool = False


class KvPolicy(Explains, ABC):
    """Decides which KV moves or is dropped when memory is short, or ahead of that.

    Attributes:
        evicts: Whether KV of jobs that do not execute is evicted for a job of higher rank. If not, the new job waits
        (the Defer baseline), and KV is evicted only if running jobs cannot continue otherwise.
        swaps: Whether KV is moved to the host instead of dropped, while the host has room.
        watches: Whether it is called at every scheduling point, not only when the worker is short of memory or the
        order is preemptive.
    """

    evicts: bool = False
    swaps: bool = False
    watches: bool = False

    @abstractmethod
    def moves(self, view: KvView, now: float) -> KvMoves:
        """The moves of this scheduling point; each job occurs at most once."""

    def may_start(self, view: KvView) -> bool:
        """Whether jobs without KV may start; False if there would be no room to move their KV to later."""
        return True


@dataclass(frozen=True, slots=True)
class ReplicaPolicies:
    """The parts that decide on one replica."""

    order: Order
    admission: Admission
    kv: KvPolicy


@dataclass(frozen=True, slots=True)
class ReplicaContext:
    """The context that an order, an admission or a KV policy is built from.

    Attributes:
        max_num_seqs: Most requests that the replica runs at once.
        order: The order of the same composition; None while the order itself is built.
    """

    settings: PolicySettings
    max_num_seqs: int
    order: Order | None = None

    def order_as(self, kind: type[OrderT]) -> OrderT:
        """The order, for a part registered with ``needs``.

        Raises:
            IntegrityError: The order is of another kind than the part's ``needs`` names.
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
