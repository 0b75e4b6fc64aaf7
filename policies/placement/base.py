"""What every placement policy sees and answers, how often it has answered what, and the two that look at no prompt.

Placement in turn is the baseline of Preble, and fair when requests cost alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, fields

from core.costs import StepCost
from core.decisions import Facts
from core.forecast import Forecast
from core.messages.cache import KVCacheEvent
from core.messages.placement import PrefixView, ReasonCount, RecentPlacement, ReplicaView
from core.request import Request
from policies.parts import Parts
from policies.settings import PolicySettings

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
    """A replica and, in a few words, why.

    Attributes:
        hit_len: Prompt tokens believed to be cached there when the request starts.
        pending_len: Of those, tokens that requests placed before it are still to compute.
    """

    replica: str
    reason: str
    hit_len: int = 0
    pending_len: int = 0

    def facts(self) -> Facts:
        """Everything that is in it, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True)
class LoadChoice(Choice):
    """A choice by load.

    Attributes:
        work_tokens: Outstanding on the chosen replica, without this request ...
        most_work_tokens: ... and on the one with the most.
        num_replicas: Between which was chosen.
    """

    work_tokens: float = 0.0
    most_work_tokens: float = 0.0
    num_replicas: int = 1


class PlacementStats:
    """What a dashboard shows of placements: counts by reason, of which there are few, and the last ``NUM_RECENT``."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._recent: deque[RecentPlacement] = deque(maxlen=NUM_RECENT)

    def add(self, request: Request, choice: Choice, placed_at: float) -> None:
        """A request was placed, at so many seconds since the epoch."""
        self._counts[choice.reason] += 1
        self._recent.appendleft(
            RecentPlacement(placed_at, choice.replica, choice.reason, request.known_len, choice.hit_len)
        )

    def reasons(self) -> tuple[ReasonCount, ...]:
        """The commonest first."""
        return tuple(ReasonCount(*each) for each in self._counts.most_common())

    def recent(self) -> tuple[RecentPlacement, ...]:
        """The newest first."""
        return tuple(self._recent)


class Placement(ABC):
    """Picks a replica for each request, and may learn from what becomes of it.

    Who only picks says how in ``choose`` and inherits the rest, which does nothing.

    Attributes:
        block_size: Tokens that each hash of ``prefix`` stands for; 0 where prefixes are not looked at.
    """

    block_size: int = 0

    @abstractmethod
    def choose(self, request: Request, prefix: Sequence[int], loads: tuple[ReplicaLoad, ...], now: float) -> Choice:
        """One of ``loads``, never empty; the request is placed there and counts from now on.

        Args:
            prefix: Chained hashes of the full blocks of its known tokens; empty without a ``block_size``.
            loads: The same object from call to call while the same replicas can take requests.
        """

    def replica_up(self, name: str, capacity: int) -> None:
        """A worker life begins that holds ``capacity`` KV tokens: what was known of this replica is void."""

    def replica_gone(self, name: str) -> None:
        """The replica will not come back; unknown ones are fine."""

    def started(self, request_id: str, cached_len: int, queue_s: float, now: float) -> None:
        """A request has first run, ``queue_s`` after it was placed, and found ``cached_len`` tokens cached."""

    def foreseen(self, request_id: str, forecast: Forecast, now: float) -> None:
        """A new forecast of a request in flight, which was placed without one or with another one."""

    def ended(self, request_id: str, output_len: int | None, now: float) -> None:
        """A request is not in flight any more; None where its output did not come to its end."""

    def noticed(self, replica: str, notice: KVCacheEvent) -> None:
        """News of what the replica caches, in blocks of ``block_size``; the first one of a worker life is whole."""

    def priced(self, replica: str, cost: StepCost) -> None:
        """What steps cost there, as measured by now."""

    def show(self, view: ReplicaView) -> ReplicaView:
        """A replica with what this policy knows of it beside."""
        return view

    def busiest_prefixes(self, limit: int) -> tuple[PrefixView, ...]:
        """The nodes of the prefix tree that most requests went through lately, each after the one above it."""
        return ()


PLACEMENTS: Parts[Placement, PolicySettings] = Parts("scheduler.placement")
"""Placements by the names that presets and ``[scheduler] placement`` use."""


class RoundRobin(Placement):
    """Each request goes to the next replica. O(1)."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: Request, prefix: Sequence[int], loads: tuple[ReplicaLoad, ...], now: float) -> Choice:
        """The replica for this request, of those given (never empty)."""
        chosen = loads[self._next % len(loads)].name
        self._next += 1
        return Choice(chosen, "in turn")


@PLACEMENTS.register("round-robin")
def build_round_robin(settings: PolicySettings) -> RoundRobin:
    """Replicas in turn."""
    return RoundRobin()


class LeastWork(Placement):
    """Goes where the fewest tokens are outstanding; of equals the first. O(replicas)."""

    def choose(self, request: Request, prefix: Sequence[int], loads: tuple[ReplicaLoad, ...], now: float) -> Choice:
        """The replica for this request, of those given (never empty)."""
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
    """The replica with the fewest outstanding tokens."""
    return LeastWork()
