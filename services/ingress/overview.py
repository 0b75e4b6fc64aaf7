"""The answers of all processes together: one status, one exposition of metrics."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Protocol, TypeVar

import aiohttp
from prometheus_client import CollectorRegistry
from ray.exceptions import RayTaskError

from farsight.actors.calls.failures import RemoteError
from farsight.actors.runtime.component import kind_of
from farsight.actors.runtime.names import (
    SUPERVISOR,
    by_host,
    initial_counts,
    own_replicas,
    replica_of,
    wanted_components,
    worker_name,
)
from farsight.actors.runtime.peer import PeerBook, PeerLost, Site, current_counts
from farsight.core.errors import FarsightError
from farsight.core.exposition import OPEN_METRICS_TYPE, exposition
from farsight.core.messages.kv import KVUsage
from farsight.core.messages.live import LeftWaiting, LiveQuery, LiveView, ReplicaLive
from farsight.core.messages.log import ArtefactInfo, LoggedWindow, RequestTrace
from farsight.core.messages.requests import LoadSnapshot
from farsight.core.messages.series import NamesQuery, RecentDecisions
from farsight.core.messages.status import ComponentStatus, StatusReply
from farsight.kvcache.cache_journal import total_usage
from farsight.policies.fleet.queue_delay import queue_delay_s
from farsight.services.api.pages.live_parts import Recent
from farsight.services.api.pages.metrics_page import merge_expositions
from farsight.services.ingress.explanations import Explanations, LoggedRequests
from farsight.services.ingress.first_check import FirstCheck
from farsight.services.process_use import processes_here

_OPEN = {"Accept": OPEN_METRICS_TYPE}
"""OpenMetrics, so that another ingress replica sends its exemplars."""

TIMEOUT_S = 1.0
"""A process that does not answer within this time is shown as dead."""

ARTEFACTS_FOR_S = 10.0
"""Seconds by which pages show learned artefacts late at most."""

MAX_ASKED = 12
"""Most components of a kind that are asked for their last decisions."""

DEFECTS = (RayTaskError, RemoteError)
"""Unexpected errors of a component, from another node or from this one."""


R = TypeVar("R")


class Own(Protocol):
    """What the asking ingress replica knows by itself."""

    ingress_id: str
    registry: CollectorRegistry
    first_check: FirstCheck

    @property
    def hears(self) -> bool: ...

    def own_traces(self, response_id: str) -> list[RequestTrace]: ...


class Overview:
    """An ``Operator`` that asks every process that there should be; none of them has to know the others."""

    def __init__(self, site: Site, peers: PeerBook, own: Own) -> None:
        self._config = site.config
        self._peers = peers
        self._own = own
        self.supervisor = peers.supervisor()
        self.router = peers.router()
        self._explanations = Explanations(peers)
        self._logged = LoggedRequests(peers, site.config)
        self._counts = initial_counts(site.config, sees=site.sees)
        self._last: dict[str, ComponentStatus] = {}
        self._learned = Recent(self._ask_artefacts, ARTEFACTS_FOR_S)

    async def status(self) -> StatusReply:
        """Returns a row for every component; components of a process that does not answer are dead.

        All processes are asked at once: however many are dead, the answer takes twice ``TIMEOUT_S`` at most.
        """
        await self._count()
        status, processes = await asyncio.gather(self._status(), asyncio.to_thread(processes_here))
        return dataclasses.replace(status, processes=processes)

    async def last_status(self) -> StatusReply:
        """Returns the status that the Supervisor saw last, by one question; without an answer, asks every process."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                seen = await self.supervisor.seen()
        except (PeerLost, TimeoutError, *DEFECTS):
            seen = None
        if seen is None:
            return await self._status()
        self._counts = seen.counts
        rows = [self._remembered(row) for row in seen.components]
        return self._reply(rows, seen.ingresses, seen.kv, await self._artefacts(self._learned.get), seen.queue_delay_s)

    async def _status(self) -> StatusReply:
        hosts = self._hosts()
        rows, ingress_rows, usages, artefacts, delay_s = await asyncio.gather(
            asyncio.gather(*(self._rows(host, components) for host, components in hosts.items())),
            self._ingress_rows(),
            asyncio.gather(*(self._kv(replica) for replica in own_replicas(self._counts))),
            self._artefacts(self._ask_artefacts),
            self._queue_delay_s(),
        )
        return self._reply(itertools.chain.from_iterable(rows), ingress_rows, total_usage(usages), artefacts, delay_s)

    def _reply(
        self,
        rows: Iterable[ComponentStatus],
        ingress_rows: Iterable[ComponentStatus],
        kv: KVUsage,
        artefacts: tuple[ArtefactInfo, ...],
        delay_s: float | None,
    ) -> StatusReply:
        drained = map(self._drained, self._counts.drained)
        return StatusReply((*map(self._with_drain, rows), *drained, *ingress_rows), kv, artefacts, delay_s)

    async def answer(self, who: str, asked: Awaitable[R]) -> R:
        """Returns a component's answer to a message.

        Raises:
            FarsightError: The component does not answer within ``TIMEOUT_S``.
        """
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await asked
        except (PeerLost, TimeoutError, *DEFECTS) as error:
            raise FarsightError(f"{who} does not answer") from error

    async def healthy(self) -> bool:
        """Returns whether a request sent to this process now would be served."""
        return self._own.hears

    async def explain(self, response_id: str) -> tuple[RequestTrace, ...]:
        """Returns what is known of the decisions behind an answer, by all components.

        Raises:
            FarsightError: Nothing is known of the answer, and the Router or the log store could not be asked.
        """
        return await self._explanations.find(response_id, self._own.own_traces(response_id))

    async def logged_around(self, request_id: str) -> LoggedWindow | None:
        """Returns the log around a request that has ended; None if it is not among the latest.

        Raises:
            FarsightError: The log cannot be read now, or steps have not been measured.
        """
        return await self._logged.around(request_id, self._own.first_check.snapshot)

    async def recent_decisions(self, kind: str) -> tuple[RecentDecisions, ...]:
        """Returns the last decisions of those components of a kind that answer; none of an ingress replica."""
        components = [SUPERVISOR, *wanted_components(self._counts, self._config.model.num_ranks)]
        asked = [name for name in components if kind_of(name, self._config) == kind][:MAX_ASKED]
        hosts = by_host(asked, self._peers.placement)
        found = await asyncio.gather(*(self._recent(host, NamesQuery(tuple(each))) for host, each in hosts.items()))
        return tuple(itertools.chain.from_iterable(found))

    async def _recent(self, host: str, query: NamesQuery) -> tuple[RecentDecisions, ...]:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return (await self._peers.host(host).recent(query)).components
        except (PeerLost, TimeoutError, *DEFECTS):
            return ()

    async def live(self, max_rows: int) -> LiveView:
        """Returns the requests on each replica that answers, at most ``max_rows`` of each."""
        replicas = own_replicas(self._counts)
        found, snapshot, left = await asyncio.gather(
            asyncio.gather(*(self._live(replica, LiveQuery(max_rows)) for replica in replicas)),
            self._snapshot(),
            self._left_waiting(),
        )
        return LiveView(tuple(filter(None, found)), snapshot.demand.num_waiting if snapshot else 0, left.requests)

    async def _left_waiting(self) -> LeftWaiting:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self.router.left_waiting()
        except (PeerLost, TimeoutError, *DEFECTS):
            return LeftWaiting()

    async def _live(self, replica: str, query: LiveQuery) -> ReplicaLive | None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._peers.scheduler(replica).live(query)
        except (PeerLost, TimeoutError, *DEFECTS):
            return None

    async def metrics(self, *, open_metrics: bool) -> str:
        """Returns the metrics of every process that answers, and of this one."""
        own_name, own_text = f"ingress-{self._own.ingress_id}", exposition(self._own.registry, open_metrics=True)
        await self._count()
        hosts = self._hosts()
        texts = await asyncio.gather(*(self._host_metrics(host) for host in hosts))
        pages = dict(zip(hosts, texts, strict=True)) | {own_name: own_text}
        rows = [row for row in await self._ingress_rows() if row.name != own_name and row.state == "ready"]
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(TIMEOUT_S)) as session:
            for row in rows:
                # Another ingress replica is no actor of ours; its port is on the loopback interface of its node.
                with suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(f"http://127.0.0.1:{row.http_port}/metrics", headers=_OPEN) as reply:
                        pages[row.name] = await reply.text()
        # In a thread: with many processes the merge takes long enough to delay streams.
        found = {name: text for name, text in pages.items() if text}
        return await asyncio.to_thread(merge_expositions, found, open_metrics=open_metrics)

    async def _count(self) -> None:
        """Asks how many components there should be."""
        with suppress(TimeoutError):
            async with asyncio.timeout(TIMEOUT_S):
                self._counts = await current_counts(self._peers, self._counts)

    def _hosts(self) -> Mapping[str, list[str]]:
        components = wanted_components(self._counts, self._config.model.num_ranks)
        return by_host([SUPERVISOR, *components], self._peers.placement)

    async def _rows(self, host: str, components: list[str]) -> list[ComponentStatus]:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                rows = (await self._peers.host(host).rows()).components
        except (PeerLost, TimeoutError):
            rows = ()
        self._last |= {row.name: row for row in rows}
        missing = set(components) - {row.name for row in rows}
        return [*rows, *(self._dead(component) for component in components if component in missing)]

    def _remembered(self, row: ComponentStatus) -> ComponentStatus:
        """Remembers a row that the Supervisor saw; a row without a process did not answer and becomes dead."""
        if not row.pid:
            return self._dead(row.name)
        self._last[row.name] = row
        return row

    async def _host_metrics(self, host: str) -> str:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._peers.actor(host).metrics()
        except (PeerLost, TimeoutError):
            return ""

    async def _kv(self, replica: str) -> KVUsage:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._peers.kv_offload_manager(replica).usage()
        except (PeerLost, TimeoutError, *DEFECTS):
            return KVUsage()

    async def _ask_artefacts(self) -> tuple[ArtefactInfo, ...]:
        return (await self._peers.log_store().artefacts()).artefacts

    async def _artefacts(self, ask: Callable[[], Awaitable[tuple[ArtefactInfo, ...]]]) -> tuple[ArtefactInfo, ...]:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await ask()
        except (FarsightError, TimeoutError, *DEFECTS):  # the log store may not have opened its file yet
            return ()

    async def _snapshot(self) -> LoadSnapshot | None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self.router.outlook()
        except (PeerLost, TimeoutError, *DEFECTS):
            return None

    async def _queue_delay_s(self) -> float | None:
        snapshot = await self._snapshot()
        return None if snapshot is None else queue_delay_s(snapshot, snapshot.num_replicas)

    async def _ingress_rows(self) -> list[ComponentStatus]:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return list((await self.router.ingress_rows()).components)
        except (PeerLost, TimeoutError, *DEFECTS):
            return []

    def _with_drain(self, row: ComponentStatus) -> ComponentStatus:
        """Replaces the state of a ready component by ``draining`` while its replica drains."""
        drains = row.state == "ready" and replica_of(row.name) in self._counts.draining
        return dataclasses.replace(row, state="draining") if drains else row

    def _drained(self, replica: str) -> ComponentStatus:
        """Makes the one row of a replica that the operator has taken out."""
        name = worker_name(replica)
        return ComponentStatus(name, kind_of(name, self._config), 0, "", "drained", 0, None, 0, 0)

    def _dead(self, component: str) -> ComponentStatus:
        """Makes the row of a dead component, from its last row if there is one."""
        last = self._last.get(component)
        if last is None:
            return ComponentStatus(component, kind_of(component, self._config), 0, "", "dead", 0, None, 0, 0)
        return dataclasses.replace(last, state="dead", queue=0, last_step_age_s=None, http_port=0)
