"""Keeps the history of the service: asks the others once a second how things are, and takes the ingress's counts.

It is the Supervisor's, because that outlives every ingress replica and is one; a new Supervisor begins a new history.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from actors.runtime.names import own_replicas
from actors.runtime.peer import PeerBook, PeerLost
from core.messages.kv import KVUsage
from core.messages.live import LiveQuery, ReplicaLive
from core.messages.series import SeriesQuery, SeriesReply, TrafficCounts
from core.messages.status import ComponentCounts
from core.series.service import Instant, ServiceSeries
from policies.fleet.queue_delay import queue_delay_s
from policies.tenancy.budgets import SharedBudgets

TICK_S = 1.0
TIMEOUT_S = 0.8
"""A component that does not answer within this time is left out of this second."""

R = TypeVar("R")


class History:
    """See the module.

    Args:
        counts: How many components there should be.
        tenants: Their sums.
    """

    def __init__(self, peers: PeerBook, counts: Callable[[], ComponentCounts], tenants: SharedBudgets) -> None:
        self._peers = peers
        self._counts = counts
        self._tenants = tenants
        self._series = ServiceSeries()

    def report(self, counts: TrafficCounts) -> None:
        """Counts of an ingress replica."""
        self._series.report(counts, time.time())

    def since(self, query: SeriesQuery) -> SeriesReply:
        """The points that the query asks for."""
        return self._series.since(query)

    async def run(self) -> None:
        """One point a second until it is cancelled."""
        while True:
            now = time.time()
            await asyncio.sleep(TICK_S - now % TICK_S)
            self._series.tick(await self._instant(), time.time())

    async def _instant(self) -> Instant:
        replicas = own_replicas(self._counts())
        outlook, live, usages = await asyncio.gather(
            _ask(self._peers.router().outlook()),
            asyncio.gather(*(_ask(self._peers.scheduler(name).live(LiveQuery())) for name in replicas)),
            asyncio.gather(*(_ask(self._peers.kv_offload_manager(name).usage()) for name in replicas)),
        )
        known = [each for each in live if each is not None]
        told = [each for each in usages if each is not None]
        return Instant(
            running=sum(each.num_running for each in known),
            waiting=sum(each.num_waiting for each in known) + (outlook.demand.num_waiting if outlook else 0),
            kv_used=_used_share(told),
            kv_peak=_peak_share(known),
            queue_delay_s=None if outlook is None else queue_delay_s(outlook, outlook.num_replicas),
            moved_bytes=_moved_bytes(told),
            tenants=self._tenants.usage(time.monotonic()),
        )


def _used_share(usages: Iterable[KVUsage]) -> float | None:
    """The share of all pools in use; None without a pool."""
    pools = [(usage.num_blocks, usage.free_blocks) for usage in usages]
    num_blocks = sum(each for each, _ in pools)
    return 1.0 - sum(free for _, free in pools) / num_blocks if num_blocks else None


def _peak_share(replicas: Iterable[ReplicaLive]) -> float | None:
    """The predicted peak of the fullest pool, as a share of it; None without a pool."""
    return max((each.peak_tokens / each.capacity_tokens for each in replicas if each.capacity_tokens), default=None)


def _moved_bytes(usages: Iterable[KVUsage]) -> int:
    return sum(usage.traffic.offloaded_bytes + usage.traffic.uploaded_bytes for usage in usages)


async def _ask(call: Awaitable[R]) -> R | None:
    """The answer; None from a component that is away or late."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await call
    except (PeerLost, TimeoutError):
        return None
