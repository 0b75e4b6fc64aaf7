"""Interfaces of the parts that a replica's scheduler is composed of, and what they read of a request.

Every part is a plain object without a clock and randomness of its own: instants come as arguments, a ``Generator`` of
numpy at construction. All parts read ``Job``s and never write them. Optional methods have a harmless default.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

from farsight.core.costs import StepCost
from farsight.core.decisions import Facts
from farsight.core.errors import IntegrityError
from farsight.core.forecast import Forecast
from farsight.core.messages.plans import Slot, SlotProgress, StartedRequest
from farsight.core.request import Request, Residency, is_flex
from farsight.policies.parts import Parts
from farsight.policies.settings import PolicySettings


@dataclass(slots=True, eq=False)
class Job:
    """A request as a replica's policies see it. Its scheduler keeps it up to date; policies only read it.

    Lengths are in tokens, instants in seconds of the caller's clock.

    Attributes:
        arrived_at: Arrival of the request; unchanged by preemptions and requeues.
        priority: Lower goes first (as in vLLM); the first sort key of every order.
        deadline_at: At equal priority the earlier one goes first; infinity for none. A ``ReplicaScheduler`` sets it
            only when the job can wait no longer (``policies.outlook.promises``).
        forecast: Prediction of the whole output length; None without one.
        cached_len: Prompt tokens known or believed to be in the replica's prefix cache.
        output_len: Tokens generated so far.
        computed_len: Known tokens whose KV is on the device; 0 before the start and after a drop.
        host_len: Known tokens whose KV is on the host.
        last_ran_at: Instant of its latest step; its arrival before the first.
        tenant, weight: As in ``Request``; only the composition of orders reads them (``policies.tenancy``).
        reading_rate: As in ``Request``.
    """

    request_id: str
    arrived_at: float
    prompt_len: int
    max_new_tokens: int
    priority: int = 0
    deadline_at: float = math.inf
    forecast: Forecast | None = None
    cached_len: int = 0
    output_len: int = 0
    computed_len: int = 0
    host_len: int = 0
    last_ran_at: float = -math.inf
    tenant: str = ""
    weight: float = 1.0
    reading_rate: float | None = None

    def __post_init__(self) -> None:
        self.last_ran_at = max(self.last_ran_at, self.arrived_at)

    @property
    def shown_forecast(self) -> Forecast | None:
        """The forecast within the limit of the output."""
        return None if self.forecast is None else self.forecast.within(self.max_new_tokens)

    @classmethod
    def of(cls, request: Request, now: float, /, **own: Any) -> Self:
        """Returns the job of a request that has just arrived, with nothing computed; ``own``: fields of a subclass."""
        return cls(
            request.request_id,
            arrived_at=now,
            prompt_len=request.prompt_len,
            max_new_tokens=request.sampling.max_new_tokens,
            priority=request.priority,
            deadline_at=now + request.all_by_s,
            forecast=request.forecast,
            cached_len=request.expected_cached_len,
            output_len=len(request.output_ids),
            tenant=request.tenant,
            weight=request.weight,
            reading_rate=request.reading_rate,
            **own,
        )

    @property
    def is_flex(self) -> bool:
        """Whether the job runs only on capacity that other jobs leave (flex)."""
        return is_flex(self.priority)

    @property
    def urgency(self) -> tuple[int, float]:
        """(priority, deadline): the keys that every order sorts by before its own."""
        return self.priority, self.deadline_at

    @property
    def known_len(self) -> int:
        """Tokens of prompt and output so far (l_p + l_t): the KV that the job needs to continue."""
        return self.prompt_len + self.output_len

    @property
    def is_resident(self) -> bool:
        """Whether the job has KV on the device."""
        return self.computed_len > 0

    @property
    def is_offloaded(self) -> bool:
        return self.host_len > 0 and self.computed_len == 0

    @property
    def missing_len(self) -> int:
        """Known tokens still to be computed before the job decodes; KV on the host is uploaded, not computed."""
        known_len = self.prompt_len + self.output_len
        if self.computed_len > 0 or self.host_len:
            there_len = self.computed_len if self.computed_len > self.host_len else self.host_len
            return known_len - there_len if there_len < known_len else 0
        return known_len - (self.cached_len if self.cached_len < self.prompt_len else self.prompt_len)

    @property
    def decodes(self) -> bool:
        """Whether the job's next step only adds one token: all known tokens but the last are computed."""
        return self.output_len > 0 and self.prompt_len + self.output_len - self.computed_len <= 1


@dataclass(slots=True, eq=False, kw_only=True)
class ScheduledRequest(Job):
    """The scheduler's one record of a request: what policies read of it, and its state in the worker as last reported.

    A mirror: the worker is the truth.

    Attributes:
        number: Its place among the requests that came to this scheduler.
        max_total_len: As ``Request.max_total_len``, which adds it up again each time.
        num_blocks: Device blocks that the request holds; 0 from the moment its KV is ordered dropped.
        shipped_in: First plan of this lease that carried the payload.
        delivered: Whether the worker has the payload.
        stalled: Whether its client is not reading.
        started: Whether the request has run and its start has been announced.
        granted_len: Total length, in tokens, that the latest plan lets the request reach.
        ran_s: Seconds of the steps that the request took part in, in this life of the worker.
        waits_since: Instant when the request came, lost its place, or had to let others go first.
        waits_for: The noted reason of the present wait; empty before one is noted, and while the request runs.
        waited_s: Seconds of all waits that are over.
        told: The worker's last report on the request; None once anything was booked since. A repeat changes nothing.
        slot: The request's slot in the last plan.
        counted_on_host: ``blocks_on_host`` as counted in the mirror's sum.
        rests: Whether the request keeps its KV but computes nothing by the latest decision.
        prefilled_len: Prompt tokens computed or found cached so far, as last reported; dropping KV does not lower it.
        first_token_at: When a report first told of output; None before that.
    """

    request: Request
    number: int
    max_total_len: int
    num_blocks: int = 0
    num_host_blocks: int = 0
    num_preemptions: int = 0
    num_moves: int = 0
    residency: Residency = Residency.DEVICE
    shipped_in: int | None = None
    delivered: bool = False
    stalled: bool = False
    started: bool = False
    granted_len: int = 0
    ran_s: float = 0.0
    prefilled_len: int = 0
    waits_since: float = 0.0
    waits_for: str = ""
    waited_s: float = 0.0
    told: SlotProgress | None = None
    slot: Slot | None = None
    counted_on_host: int = 0
    rests: bool = False
    first_token_at: float | None = None

    @property
    def blocks_on_host(self) -> int:
        """Blocks of the host pool that the request holds or is about to hold."""
        if self.residency is Residency.HOST and self.num_blocks > self.num_host_blocks:
            return self.num_blocks
        return self.num_host_blocks

    @property
    def is_leaving(self) -> bool:
        """Whether the request is ordered to the host and its device blocks are not free yet."""
        return self.residency is Residency.HOST and self.num_blocks > 0

    def has_been_told(self, progress: SlotProgress) -> bool:
        """Returns whether the worker reported the same progress before and nothing has been booked here since."""
        told = self.told
        return told is not None and told.ran_s == progress.ran_s and told == progress

    def update(self, progress: SlotProgress, block_size: int) -> float:
        """Takes over the worker's report, except what orders already under way will change.

        Returns:
            Seconds that the request has run since the previous report.
        """
        self.told = progress
        ran_s, self.ran_s = progress.ran_s - self.ran_s, progress.ran_s
        self.output_len = progress.output_len
        self.stalled = progress.stalled
        if progress.num_preemptions < self.num_preemptions:
            return ran_s  # the worker has not dropped its KV yet, but will
        self.num_blocks, self.num_host_blocks = progress.num_blocks, progress.num_host_blocks
        if progress.cached_len > self.cached_len:
            self.cached_len = progress.cached_len
        self.computed_len = progress.computed_len if progress.num_blocks else 0
        on_host = progress.num_host_blocks * block_size
        self.host_len = min(progress.computed_len, on_host) if on_host else 0
        return ran_s

    def first_run(self, cached_len: int, ran_s: float, now: float) -> StartedRequest:
        """Books the first run, of ``ran_s`` seconds by ``now``; ``cached_len`` replaces the believed cached tokens."""
        self.started, self.cached_len = True, cached_len
        queue_s = max(0.0, now - self.arrived_at - ran_s)
        return StartedRequest(self.request_id, self.request.attempt, cached_len, queue_s)

    def end(self, output_len: int, ran_s: float, now: float) -> None:
        """Books the end on the worker, which may come before any report of progress."""
        self.output_len, self.ran_s = output_len, max(self.ran_s, ran_s)
        if self.first_token_at is None and output_len:
            self.first_token_at = now

    def decode(self, num_steps: int, duration_s: float, block_size: int) -> None:
        """Books ``num_steps`` decoded tokens before the worker reports them."""
        self.told = None
        self.output_len += num_steps
        self.computed_len += num_steps
        num_blocks = -(-self.computed_len // block_size)
        if num_blocks > self.num_blocks:
            self.num_blocks = num_blocks
        self.ran_s += duration_s

    def drop_kv(self) -> None:
        """Books a preemption: the KV on the device and on the host is ordered dropped."""
        self.told = None
        self.num_preemptions += 1
        self.num_blocks = self.num_host_blocks = 0
        self.computed_len = self.host_len = 0


def make_scheduled(request: Request, now: float, number: int = 0) -> ScheduledRequest:
    """Returns the record of a request that has just arrived, with no deadline yet."""
    scheduled = ScheduledRequest.of(
        request, now, request=request, number=number, max_total_len=request.max_total_len, waits_since=now
    )
    scheduled.deadline_at = math.inf
    return scheduled


OrderT = TypeVar("OrderT", bound="Order")


class Explains:
    """A part that can report the numbers behind its decisions."""

    def explain(self, job: Job, now: float) -> Facts:
        """Returns the numbers behind the latest decision about the job, without side effects; none by default.

        The scheduler calls it when it admits, refuses, preempts or moves a job or changes its level, not at every step.
        """
        return {}


class Order(Explains, ABC):
    """Ranks the jobs of a replica in continuous batching.

    Thousands of jobs may wait, so the work at a scheduling point must be bounded by the number of changed and taken
    jobs, apart from a few numpy operations over all jobs.

    Attributes:
        cuts_off: Whether an iteration is cut off, and its work lost, when ``slice_s`` of one of its jobs is over.
        preemptive: Whether a waiting job may replace a running job of lower rank. If not, running jobs come before
        all waiting ones, in order of admission, and ``ranked`` decides among the waiting jobs.
        ranks_on_demand: Whether ``refresh`` and ``ranked`` may be left out at a scheduling point where all jobs run.
        on_move: A callback that the scheduler sets: an order that moves jobs between levels calls it with the job,
        ``promoted`` or ``demoted``, and the instant. None if the scheduler does not need it.
    """

    preemptive: bool = False
    cuts_off: bool = False
    ranks_on_demand: bool = False
    on_move: Callable[[Job, str, float], None] | None = None

    @abstractmethod
    def add(self, job: Job, now: float) -> None:
        """Adds a job that has arrived; the job stays until its end, whether it runs, waits or has lost its KV."""

    @abstractmethod
    def remove(self, job: Job) -> None:
        """Removes a job that has ended or was aborted; unknown jobs are ignored."""

    @abstractmethod
    def ranked(self, now: float) -> Iterator[Job]:
        """Yields all jobs, best first, lazily: n jobs cost O(n). Callers do not change the order meanwhile."""

    def foreseen(self, job: Job) -> None:
        """Takes note that the job has a new ``forecast``, perhaps its first."""

    def changed(self, job: Job) -> None:
        """Takes note, before ``ran``, that the job's lengths, its KV's place or its hits may have changed, if known."""

    def price(self, cost: StepCost, capacity: int) -> None:
        """Sets the step cost and the KV capacity in tokens; called at the start and after each change."""

    def learn(self, job: Job, *, censored: bool) -> None:
        """Learns from a removed job that has ended; ``censored``: its natural length is unknown (cut off)."""

    def ran(self, job: Job, duration_s: float, now: float) -> None:
        """Takes note of ``duration_s`` seconds of steps with the job since the last call; its state is up to date."""

    def refresh(self, now: float) -> None:
        """Begins a scheduling point: applies due promotions and rank changes."""

    def slice_s(self, job: Job) -> float:
        """Returns how many seconds the job may run before this order must see it again; infinity for no bound."""
        return math.inf

    def num_places(self, most: int, now: float) -> int:
        """Returns how many jobs are to execute at once now, at most ``most``, the engine's limit."""
        return most


@runtime_checkable
class RanksSome(Protocol):
    """An order that can rank a subset of its jobs without the others."""

    def among(self, jobs: Sequence[Job], now: float) -> list[Job]:
        """Returns these jobs in the order of ``ranked``. O(k log k) for k jobs."""
        ...


class Admission(Explains, ABC):
    """Decides whether a job may become resident. Calls per scheduling point: ``begin``, then ``admits`` and ``add``.

    It may be left out where all jobs fit at their limits beside its ``reserve``, if it ``admits_what_fits`` at least.
    """

    admits_what_fits: bool = False

    @abstractmethod
    def begin(self, running: Sequence[Job], capacity: int) -> None:
        """Begins a scheduling point.

        Args:
            running: Jobs that continue to run whatever is decided.
            capacity: KV tokens that running and admitted jobs may fill together, now and later.
        """

    @abstractmethod
    def admits(self, job: Job) -> bool:
        """Returns whether the job fits beside running and added jobs; without any, a job that fits alone is fine."""

    @abstractmethod
    def add(self, job: Job) -> None:
        """Counts the job as running from now on."""

    def reserve(self, capacity: int) -> int:
        """Returns the KV tokens that admission keeps free for the growth of running jobs."""
        return 0

    def learn(self, output_len: int, *, censored: bool) -> None:
        """Learns from a job that has ended; ``censored``: its natural length is unknown (its limit or an abort)."""


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

    def start_room(self, host_share: float) -> float:
        """Returns the KV tokens with which jobs may start, so that all KV they push off the device fits on the host.

        Room promised to other jobs is subtracted, even before their victims are chosen. Each start beyond this limit
        makes another job drop its KV and start again (ADR 83).

        Args:
            host_share: Share of the host's pool that stays free for jobs that change places and for growth.

        Returns:
            Infinity without a host pool, since no KV is moved there.
        """
        if not self.host_capacity:
            return math.inf
        spare = self.host_free - host_share * self.host_capacity
        return max(0.0, self.free - self.needed + spare) if spare >= 0 else 0.0


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
        """Returns the moves of this scheduling point; each job occurs at most once."""

    def is_due(self, view: KvView) -> bool:
        """Returns whether ``moves`` may return any move; only then does the Scheduler ask the KVOffloadManager."""
        return view.needed > view.free

    def idle_target(self, view: KvView) -> int:
        """Returns the device tokens to keep free for jobs that are yet to come."""
        return 0

    def start_room(self, view: KvView) -> float:
        """Returns the KV tokens that jobs without KV may begin with at this point, in sum; 0 if none may start.

        Infinity: this policy sets no limit. A limit keeps room on the host for the KV that starting jobs push out.
        """
        return math.inf


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
        """Returns the order, for a part registered with ``needs``.

        Raises:
            IntegrityError: The order is of another kind than the part's ``needs`` names.
        """
        if not isinstance(self.order, kind):
            raise IntegrityError(f"a part that needs {kind.__name__} was composed with {type(self.order).__name__}")
        return self.order


ORDERS: Parts[Order, ReplicaContext] = Parts("scheduler.order")
ADMISSIONS: Parts[Admission, ReplicaContext] = Parts("scheduler.admission")
KV_POLICIES: Parts[KvPolicy, ReplicaContext] = Parts("scheduler.kv")
"""Parts by the names that presets and ``[scheduler]`` use."""
