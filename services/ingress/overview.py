"""The answers of all processes together: one status, one exposition of metrics."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import sys
from collections.abc import Awaitable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

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
from farsight.core.messages.live import LeftWaiting, LiveQuery, LiveView
from farsight.core.messages.log import ArtefactInfo, LoggedWindow, RequestTrace
from farsight.core.messages.series import NamesQuery, RecentDecisions
from farsight.core.messages.status import ComponentRows, ComponentStatus, StatusReply
from farsight.kvcache.cache_journal import total_usage
from farsight.policies.fleet.queue_delay import queue_delay_s
from farsight.services.api.pages.live import Recent
from farsight.services.api.pages.metrics_page import merge_expositions
from farsight.services.ingress.explanations import Explanations
from farsight.services.process_use import processes_here

if TYPE_CHECKING:
    from farsight.services.ingress.engine_client import EngineClient

_OPEN = {"Accept": OPEN_METRICS_TYPE}
"""OpenMetrics, so that another ingress replica sends its exemplars."""

TIMEOUT_S = 1.0
"""A process that does not answer within this time is shown as dead."""

ARTEFACTS_FOR_S = 10.0
"""Seconds by which pages show learned artefacts late at most."""

MAX_ASKED = 12
"""Most components of a kind that are asked for their last decisions."""


def failures(expected: type[FarsightError]) -> tuple[type[Exception], ...]:
    """Returns that error, lateness, and unexpected errors of a component here or, where there is Ray, elsewhere."""
    ray = sys.modules.get("ray.exceptions")
    found = (expected, TimeoutError, RemoteError)
    return found if ray is None else (*found, ray.RayTaskError)


R = TypeVar("R")


async def _said(asked: Awaitable[R], otherwise: R) -> R:
    """Returns a component's answer within ``TIMEOUT_S``; the other value where there is none."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await asked
    except failures(FarsightError):
        return otherwise


class Overview:
    """An ``Operator`` that asks every process that there should be; none of them has to know the others.

    Args:
        own: The asking ingress replica.
    """

    def __init__(self, site: Site, peers: PeerBook, own: EngineClient) -> None:
        self._config = site.config
        self._peers = peers
        self._own = own
        self.supervisor = peers.supervisor()
        self.router = peers.router()
        self._explanations = Explanations(peers, site.config)
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
        seen = await _said(self.supervisor.seen(), None)
        if seen is None:
            return await self._status()
        self._counts = seen.counts
        rows = [self._remembered(row) for row in seen.components]
        learned = await _said(self._learned.get(), ())
        return self._reply(rows, seen.ingresses, seen.kv, learned, seen.queue_delay_s)

    async def _status(self) -> StatusReply:
        hosts, replicas = self._hosts(), own_replicas(self._counts)
        rows, ingress_rows, usages, artefacts, delay_s = await asyncio.gather(
            asyncio.gather(*(self._rows(host, components) for host, components in hosts.items())),
            self._ingress_rows(),
            asyncio.gather(*(_said(self._peers.kv_offload_manager(each).usage(), KVUsage()) for each in replicas)),
            _said(self._ask_artefacts(), ()),
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
        except failures(PeerLost) as error:
            raise FarsightError(f"{who} does not answer") from error

    async def healthy(self) -> bool:
        """Returns whether a request sent to this process now would be served."""
        return self._own.hears

    async def explain(self, response_id: str) -> tuple[RequestTrace, ...]:
        """Returns what is known of the decisions behind an answer, as ``Operator.explain``."""
        return await self._explanations.find(response_id, self._own.own_traces(response_id))

    async def logged_around(self, request_id: str) -> LoggedWindow | None:
        """Returns the log around a request that has ended, as ``Operator.logged_around``."""
        return await self._explanations.around(request_id, self._own.first_check.snapshot)

    async def recent_decisions(self, kind: str) -> tuple[RecentDecisions, ...]:
        """Returns the last decisions of those components of a kind that answer; none of an ingress replica."""
        components = [SUPERVISOR, *wanted_components(self._counts, self._config.model.num_ranks)]
        asked = [name for name in components if kind_of(name, self._config) == kind][:MAX_ASKED]
        hosts = by_host(asked, self._peers.placement)
        asked_hosts = (self._peers.host(host).recent(NamesQuery(tuple(each))) for host, each in hosts.items())
        found = await asyncio.gather(*(_said(each, None) for each in asked_hosts))
        return tuple(decided for reply in found if reply is not None for decided in reply.components)

    async def live(self, max_rows: int) -> LiveView:
        """Returns the requests on each replica that answers, at most ``max_rows`` of each."""
        replicas = own_replicas(self._counts)
        found, snapshot, left = await asyncio.gather(
            asyncio.gather(*(_said(self._peers.scheduler(each).live(LiveQuery(max_rows)), None) for each in replicas)),
            _said(self.router.outlook(), None),
            _said(self.router.left_waiting(), LeftWaiting()),
        )
        return LiveView(tuple(filter(None, found)), snapshot.demand.num_waiting if snapshot else 0, left.requests)

    async def metrics(self, *, open_metrics: bool) -> str:
        """Returns the metrics of every process that answers, and of this one."""
        own_name, own_text = f"ingress-{self._own.ingress_id}", exposition(self._own.registry, open_metrics=True)
        await self._count()
        hosts = self._hosts()
        texts = await asyncio.gather(*(_said(self._peers.actor(host).metrics(), "") for host in hosts))
        pages = dict(zip(hosts, texts, strict=True)) | {own_name: own_text}
        rows = [row for row in await self._ingress_rows() if row.name != own_name and row.state == "ready"]
        import aiohttp  # only here: a model in one process has no other ingress replicas to ask

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
        self._counts = await _said(current_counts(self._peers, self._counts), self._counts)

    def _hosts(self) -> Mapping[str, list[str]]:
        components = wanted_components(self._counts, self._config.model.num_ranks)
        return by_host([SUPERVISOR, *components], self._peers.placement)

    async def _rows(self, host: str, components: list[str]) -> list[ComponentStatus]:
        rows = (await _said(self._peers.host(host).rows(), ComponentRows(()))).components
        self._last |= {row.name: row for row in rows}
        missing = set(components) - {row.name for row in rows}
        return [*rows, *(self._dead(component) for component in components if component in missing)]

    def _remembered(self, row: ComponentStatus) -> ComponentStatus:
        """Remembers a row that the Supervisor saw; a row without a process did not answer and becomes dead."""
        if not row.pid:
            return self._dead(row.name)
        self._last[row.name] = row
        return row

    async def _ask_artefacts(self) -> tuple[ArtefactInfo, ...]:
        return (await self._peers.log_store().artefacts()).artefacts

    async def _queue_delay_s(self) -> float | None:
        snapshot = await _said(self.router.outlook(), None)
        return None if snapshot is None else queue_delay_s(snapshot, snapshot.num_replicas)

    async def _ingress_rows(self) -> tuple[ComponentStatus, ...]:
        return (await _said(self.router.ingress_rows(), ComponentRows(()))).components

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
