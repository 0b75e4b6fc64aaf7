"""Keeps the history of the service: asks every component for its status once a second, and takes the ingress's counts.

The Supervisor keeps it because there is one Supervisor, which outlives every ingress replica; a new Supervisor begins a
new history.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TypeVar

from farsight.actors.runtime.component import kind_of
from farsight.actors.runtime.names import SUPERVISOR, by_host, own_replicas, wanted_components, worker_name
from farsight.actors.runtime.peer import PeerBook, PeerLost
from farsight.core.config.load import FarsightConfig
from farsight.core.messages.kv import KVUsage
from farsight.core.messages.live import LiveQuery, ReplicaLive
from farsight.core.messages.placement import ReplicaLoads
from farsight.core.messages.requests import LoadSnapshot
from farsight.core.messages.series import (
    Activity,
    ComponentsQuery,
    ComponentsReply,
    Count,
    NamesQuery,
    SeriesQuery,
    SeriesReply,
    TableReply,
    TrafficCounts,
)
from farsight.core.messages.status import ComponentCounts, ComponentRows, ComponentStatus, SeenService
from farsight.core.series.components import MAX_COMPONENTS, ComponentHistory, SeriesTable
from farsight.core.series.service import Instant, ServiceSeries
from farsight.kvcache.cache_journal import total_usage
from farsight.policies.fleet.queue_delay import queue_delay_s
from farsight.policies.tenancy.budgets import SharedBudgets

TICK_S = 1.0
TIMEOUT_S = 0.8
"""Seconds after which a component that has not answered is left out of a point."""

FRESH_S = 2.5
"""Most seconds since an observation that is told: pages show a stopped component within 5 s and ask every 2 s."""

MAX_REPLICAS = 64
REPLICA_COLUMNS = ("requests", "work_tokens", "waiting", "kv_used")
"""Columns of each replica; ``MAX_REPLICAS`` replicas take 2.4 MB."""

MAX_SHOWN = 16
"""Most replicas in one answer."""

R = TypeVar("R")


class History:
    """Asks, takes counts and answers queries; see the module.

    Args:
        counts: Returns the desired numbers of components.
        tenants: Sums of the tenants' usage.
    """

    def __init__(
        self, peers: PeerBook, config: FarsightConfig, counts: Callable[[], ComponentCounts], tenants: SharedBudgets
    ) -> None:
        self._peers = peers
        self._config = config
        self._counts = counts
        self._tenants = tenants
        self._series = ServiceSeries()
        self._replicas = SeriesTable(MAX_REPLICAS, len(REPLICA_COLUMNS))
        self._components = ComponentHistory()
        self._traffic: dict[str, TrafficCounts] = {}
        self._kv = KVUsage()
        self._queue_delay_s: float | None = None
        self._rows: tuple[tuple[ComponentStatus, ...], tuple[ComponentStatus, ...]] = (), ()
        self._rows_at = -math.inf

    def report(self, counts: TrafficCounts) -> None:
        """Takes the counts of an ingress replica."""
        self._traffic[ingress_name(counts.ingress_id)] = counts
        self._series.report(counts, time.time())

    def seen(self) -> SeenService | None:
        """Returns the last observation of the service; None if it is older than ``FRESH_S`` or incomplete."""
        components, ingresses = self._rows
        known = [row.name for row in components]
        if time.monotonic() - self._rows_at > FRESH_S or sorted(known) != sorted(self._wanted()):
            return None
        return SeenService(self._counts(), components, ingresses, self._kv, self._queue_delay_s)

    def loaded(self) -> float | None:
        """Returns the share of their weights that the workers have read; None if no worker reports it."""
        shares = [row.loaded for row in self._workers()]
        known = [share for share in shares if share is not None]
        return sum(known) / len(shares) if known else None

    def preparing(self) -> str:
        """Returns what holds up the start of a worker; empty if nothing does."""
        return next((row.preparing for row in self._workers() if row.preparing), "")

    def _workers(self) -> list[ComponentStatus]:
        workers = set(map(worker_name, own_replicas(self._counts())))
        return [row for row in self._rows[0] if row.name in workers]

    def since(self, query: SeriesQuery) -> SeriesReply:
        """Returns the points that the query asks for."""
        return self._series.since(query)

    def of_replicas(self, query: SeriesQuery) -> TableReply:
        """Returns the loads of the replicas over time."""
        return self._replicas.since(query, sorted(self._replicas.names), MAX_SHOWN)

    def of_components(self, query: ComponentsQuery) -> ComponentsReply:
        """Returns queues, rates, health and restarts of a kind of components over time."""
        return self._components.since(query)

    async def run(self) -> None:
        """Records one point a second until cancelled."""
        while True:
            now = time.time()
            await asyncio.sleep(TICK_S - now % TICK_S)
            await asyncio.gather(self._note_service(), self._note_components())

    async def _note_service(self) -> None:
        """Records a point of the whole service and of each replica."""
        replicas = own_replicas(self._counts())
        outlook, placed, live, usages = await asyncio.gather(
            _ask(self._peers.router().outlook()),
            _ask(self._peers.router().replica_loads()),
            asyncio.gather(*(_ask(self._peers.scheduler(name).live(LiveQuery())) for name in replicas)),
            asyncio.gather(*(_ask(self._peers.kv_offload_manager(name).usage()) for name in replicas)),
        )
        known = {name: each for name, each in zip(replicas, live, strict=True) if each is not None}
        told = {name: each for name, each in zip(replicas, usages, strict=True) if each is not None}
        now = time.time()
        instant = self._instant(outlook, known, told.values())
        self._kv, self._queue_delay_s = total_usage(list(told.values())), instant.queue_delay_s
        self._series.tick(instant, now)
        self._replicas.tick(replica_values(placed, known, told), now)

    def _instant(
        self, outlook: LoadSnapshot | None, live: Mapping[str, ReplicaLive], usages: Iterable[KVUsage]
    ) -> Instant:
        known, told = list(live.values()), list(usages)
        return Instant(
            running=sum(each.num_running for each in known),
            waiting=sum(each.num_waiting for each in known) + (outlook.demand.num_waiting if outlook else 0),
            kv_used=_used_share(told),
            kv_peak=_peak_share(known),
            queue_delay_s=None if outlook is None else queue_delay_s(outlook, outlook.num_replicas),
            moved_bytes=_moved_bytes(told),
            forecasts={name: each.forecasts for name, each in live.items()},
            prompt_tokens={name: each.prompt_tokens for name, each in live.items()},
            gpu_s={name: each.gpu_s for name, each in live.items()},
            tenants=self._tenants.usage(time.monotonic()),
        )

    async def _note_components(self) -> None:
        """Records a point of each component; components beyond ``MAX_COMPONENTS`` are not asked."""
        hosts = by_host(self._wanted()[:MAX_COMPONENTS], self._peers.placement)
        rows = self._peers.router().ingress_rows()
        found, ingresses = await asyncio.gather(
            asyncio.gather(*(self._activity(host, names) for host, names in hosts.items())), _ask(rows)
        )
        own, entries = list(itertools.chain.from_iterable(found)), self._ingresses(ingresses)
        self._rows = tuple(each.row for each in own), tuple(each.row for each in entries)
        self._rows_at = time.monotonic()
        self._components.tick([*own, *entries], time.time())

    def _wanted(self) -> list[str]:
        """Returns the names of all components that should run, except the ingress replicas."""
        return [SUPERVISOR, *wanted_components(self._counts(), self._config.model.num_ranks)]

    async def _activity(self, host: str, names: list[str]) -> list[Activity]:
        """Asks a process for its components; a component that its answer lacks counts as dead."""
        reply = await _ask(self._peers.host(host).activity(NamesQuery(tuple(names))))
        told = {each.row.name: each for each in reply.components} if reply else {}
        return [told.get(name) or Activity(self._dead(name), ()) for name in names]

    def _dead(self, name: str) -> ComponentStatus:
        return ComponentStatus(name, kind_of(name, self._config), 0, "", "dead", 0, None, 0, 0)

    def _ingresses(self, rows: ComponentRows | None) -> list[Activity]:
        if rows is None:
            return []
        listed = {row.name for row in rows.components}
        self._traffic = {name: each for name, each in self._traffic.items() if name in listed}
        return [Activity(row, _ingress_counts(self._traffic.get(row.name))) for row in rows.components]


def ingress_name(ingress_id: str) -> str:
    """Returns the component name of an ingress replica."""
    return f"ingress-{ingress_id}"


def _ingress_counts(counts: TrafficCounts | None) -> tuple[Count, ...]:
    if counts is None:
        return ()
    return (
        Count("requests ended", counts.ended),
        Count("requests failed", counts.failed),
        Count("requests abandoned", counts.abandoned),
        Count("requests refused", counts.rejected),
        Count("prompt tokens", counts.prompt_tokens),
        Count("output tokens", counts.output_tokens),
    )


def replica_values(
    placed: ReplicaLoads | None, live: Mapping[str, ReplicaLive], usages: Mapping[str, KVUsage]
) -> dict[str, dict[str, float]]:
    """Returns the columns of each replica that the Router, its Scheduler or its KVOffloadManager reported."""
    rows: dict[str, dict[str, float]] = {}
    for view in placed.replicas if placed else ():
        rows[view.replica] = {"requests": float(view.num_requests), "work_tokens": view.work_tokens}
    for name, each in live.items():
        rows.setdefault(name, {})["waiting"] = float(each.num_waiting)
    for name, usage in usages.items():
        if usage.num_blocks:
            rows.setdefault(name, {})["kv_used"] = 1.0 - usage.free_blocks / usage.num_blocks
    return rows


def _used_share(usages: Iterable[KVUsage]) -> float | None:
    """Returns the used share of all KV pools together; None without a pool."""
    pools = [(usage.num_blocks, usage.free_blocks) for usage in usages]
    num_blocks = sum(each for each, _ in pools)
    return 1.0 - sum(free for _, free in pools) / num_blocks if num_blocks else None


def _peak_share(replicas: Iterable[ReplicaLive]) -> float | None:
    """Returns the highest predicted peak of a replica's KV as a share of its pool; None without a pool."""
    return max((each.peak_tokens / each.capacity_tokens for each in replicas if each.capacity_tokens), default=None)


def _moved_bytes(usages: Iterable[KVUsage]) -> int:
    return sum(usage.traffic.offloaded_bytes + usage.traffic.uploaded_bytes for usage in usages)


async def _ask(call: Awaitable[R]) -> R | None:
    """Returns the answer; None from a component that is away or slower than ``TIMEOUT_S``."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await call
    except (PeerLost, TimeoutError):
        return None
