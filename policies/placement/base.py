"""The interface of placement policies, counts of what they chose, and the two policies that look at no prompt.

Round-robin is the baseline of Preble; it is fair if requests cost alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, fields

from farsight.core.costs import StepCost
from farsight.core.decisions import Facts
from farsight.core.forecast import Forecast
from farsight.core.messages.placement import PrefixView, ReasonCount, RecentPlacement, ReplicaView
from farsight.core.messages.plans import KVCacheEvent
from farsight.core.request import Request
from farsight.policies.parts import Parts
from farsight.policies.settings import PolicySettings

NUM_RECENT = 20
"""Placements that a dashboard shows one by one."""


@dataclass(slots=True)
class ReplicaLoad:
    """A replica as placement sees it; kept up to date in place.

    Attributes:
        work_tokens: Tokens of prompt and expected output of the requests placed there and not ended.
    """

    name: str
    num_requests: int
    work_tokens: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen replica, and the reason in a few words.

    Attributes:
        hit_len: Prompt tokens believed to be cached on the replica when the request starts.
        pending_len: Tokens of ``hit_len`` that requests placed before it have yet to compute.
    """

    replica: str
    reason: str
    hit_len: int = 0
    pending_len: int = 0

    def facts(self) -> Facts:
        """Returns all fields by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True)
class LoadChoice(Choice):
    """A choice by load.

    Attributes:
        work_tokens: Outstanding tokens on the chosen replica, without this request.
        most_work_tokens: Outstanding tokens on the replica that has the most.
        num_replicas: Number of replicas that could have been chosen.
    """

    work_tokens: float = 0.0
    most_work_tokens: float = 0.0
    num_replicas: int = 1


class PlacementStats:
    """Placements as a dashboard shows them: counts by reason (reasons are few), and the last ``NUM_RECENT``."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._recent: deque[RecentPlacement] = deque(maxlen=NUM_RECENT)

    def add(self, request: Request, choice: Choice, placed_at: float) -> None:
        """Counts a placed request; ``placed_at`` is in seconds since the epoch."""
        self._counts[choice.reason] += 1
        self._recent.appendleft(
            RecentPlacement(placed_at, choice.replica, choice.reason, request.known_len, choice.hit_len)
        )

    @property
    def num_placed(self) -> int:
        """Requests placed so far."""
        return self._counts.total()

    def reasons(self) -> tuple[ReasonCount, ...]:
        """Returns the counts by reason, the largest first."""
        return tuple(ReasonCount(*each) for each in self._counts.most_common())

    def recent(self) -> tuple[RecentPlacement, ...]:
        """Returns the recent placements, the newest first."""
        return tuple(self._recent)


class Placement(ABC):
    """Picks a replica for each request; may learn from later events of the request.

    A policy must define ``choose``. Every other method is an optional hook that does nothing by default.

    Attributes:
        block_size: Tokens that each hash of ``prefix`` stands for; 0 if the policy does not use prefixes.
    """

    block_size: int = 0

    @abstractmethod
    def choose(self, request: Request, prefix: Sequence[int], loads: tuple[ReplicaLoad, ...], now: float) -> Choice:
        """Picks one of ``loads``; the caller places the request there.

        Args:
            prefix: Chained hashes of the full blocks of the request's known tokens; empty if ``block_size`` is 0.
            loads: The replicas that take requests, at least one. The same tuple object from call to call while these
                replicas stay the same; its elements change in place.
        """

    def replica_up(self, name: str, capacity: int) -> None:
        """Begins a life of the replica's worker, with room for ``capacity`` KV tokens; earlier knowledge is void."""

    def replica_gone(self, name: str) -> None:
        """Forgets a replica that will not come back; unknown names are ignored."""

    def started(self, request_id: str, cached_len: int, queue_s: float, now: float) -> None:
        """Books the first run of a request, ``queue_s`` after its placement, with ``cached_len`` tokens cached."""

    def foreseen(self, request_id: str, forecast: Forecast, now: float) -> None:
        """Books a new forecast of a request in flight, which was placed without a forecast or with another one."""

    def ended(self, request_id: str, output_len: int | None, now: float) -> None:
        """Books that a request is no longer in flight; ``output_len`` is None if its output is incomplete."""

    def noticed(self, replica: str, notice: KVCacheEvent) -> None:
        """Applies a change of cached blocks, of ``block_size`` tokens; the first event of a worker life is whole."""

    def priced(self, replica: str, cost: StepCost) -> None:
        """Sets the measured step cost of the replica, which is new or has changed."""

    def show(self, view: ReplicaView) -> ReplicaView:
        """Returns ``view`` with this policy's own numbers about the replica added."""
        return view

    def busiest_prefixes(self, limit: int) -> tuple[PrefixView, ...]:
        """Returns the ``limit`` nodes of the prefix tree that most recent requests go through, parents first."""
        return ()


PLACEMENTS: Parts[Placement, PolicySettings] = Parts("scheduler.placement")
"""Placements by the names that presets and ``[scheduler] placement`` use."""


class RoundRobin(Placement):
    """Sends each request to the next replica. O(1)."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: Request, prefix: Sequence[int], loads: tuple[ReplicaLoad, ...], now: float) -> Choice:
        """Returns the next of ``loads`` (never empty)."""
        chosen = loads[self._next % len(loads)].name
        self._next += 1
        return Choice(chosen, "in turn")


@PLACEMENTS.register("round-robin")
def build_round_robin(settings: PolicySettings) -> RoundRobin:
    """Sends requests to the replicas in turn."""
    return RoundRobin()


class LeastWork(Placement):
    """Sends a request to the replica with the fewest outstanding tokens; to the first among equals. O(replicas)."""

    def choose(self, request: Request, prefix: Sequence[int], loads: tuple[ReplicaLoad, ...], now: float) -> Choice:
        """Returns the replica of ``loads`` (never empty) with the fewest outstanding tokens."""
        least, most = min(loads, key=_work), max(loads, key=_work)
        return LoadChoice(
            least.name,
            "least work",
            work_tokens=least.work_tokens,
            most_work_tokens=most.work_tokens,
            num_replicas=len(loads),
        )


def _work(load: ReplicaLoad) -> float:
    return load.work_tokens


@PLACEMENTS.register("least-work")
def build_least_work(settings: PolicySettings) -> LeastWork:
    """Sends a request to the replica with the fewest outstanding tokens."""
    return LeastWork()
