"""The exchange of an ingress replica with the Supervisor: whether it watches, when to drain, tenants and traffic."""

from __future__ import annotations

import asyncio
import logging
import uuid
from contextlib import suppress
from typing import Protocol

from farsight.actors.runtime.peer import LOOK_AGAIN_S, PeerBook, PeerLost
from farsight.core.errors import FarsightError
from farsight.core.messages.supervision import IngressOrders, IngressReport
from farsight.core.messages.tenants import TenantReport, TenantUsage
from farsight.core.series.tally import TrafficTally
from farsight.services.api.access.access_control import AccessControl
from farsight.services.api.readiness import Readiness

logger = logging.getLogger(__name__)

REPORT_S = 0.5
"""Seconds between two reports."""

SUPERVISED_S = 5.0
"""Seconds without an answer of the Supervisor after which an ingress replica is unhealthy: dead components are not
replaced then."""

STOPPED = "the server is stopping, and the time for requests to end is over"


class Streams(Protocol):
    """The open requests of an ingress replica."""

    @property
    def ingress_id(self) -> str: ...

    @property
    def model_version(self) -> int: ...

    @property
    def oldest_version(self) -> int: ...

    async def use_weights(self, version: int, oldest: int) -> None: ...

    def use_limits(self, limits: str) -> None: ...

    def end_streams(self, reason: str) -> None: ...


class SupervisorLink:
    """Reports to the Supervisor until it is cancelled.

    Once it has heard that the service drains, it refuses new requests for the rest of its life. At the time that it was
    told it ends all open requests. Neither needs a living Supervisor.

    Args:
        streams: The open requests, and the weights for new ones.
    """

    def __init__(self, peers: PeerBook, readiness: Readiness, streams: Streams) -> None:
        self._supervisor = peers.supervisor()
        self._readiness = readiness
        self._streams = streams
        self._ingress_id = streams.ingress_id
        self._ends_at = 0.0
        self._end: asyncio.TimerHandle | None = None
        self._switch: asyncio.Task[None] | None = None

    async def join(self) -> None:
        """Waits until a Supervisor has answered, so that new requests' weights are known, and no switch is due."""
        while not await self.report() or self._switches:  # noqa: ASYNC110, the report asks another process
            await asyncio.sleep(LOOK_AGAIN_S)

    @property
    def _switches(self) -> bool:
        return self._switch is not None and not self._switch.done()

    async def run(self) -> None:
        while True:
            await self.report()
            await asyncio.sleep(REPORT_S)

    async def report(self) -> bool:
        """Sends one report; returns whether the Supervisor has answered."""
        readiness = self._readiness
        report = IngressReport(
            self._ingress_id,
            readiness.num_open,
            readiness.is_draining,
            self._streams.model_version,
            self._streams.oldest_version,
        )
        try:
            async with asyncio.timeout(SUPERVISED_S):
                orders = await self._supervisor.report_ingress(report)
                readiness.heard_supervisor()
                self._streams.use_limits(orders.limits)
                await self._use_weights(orders)
        except (PeerLost, TimeoutError):
            return False
        if orders.drain_s is not None:
            self._drain(orders.drain_s)
        return True

    async def _use_weights(self, orders: IngressOrders) -> None:
        """Switches weights now, or at the instant that the orders name; the next report makes that more exact."""
        if self._switch is not None:
            self._switch.cancel()
        if orders.switch_in_s > 0 and orders.model_version > self._streams.model_version:
            self._switch = asyncio.create_task(self._switch_later(orders))
        else:
            await self._streams.use_weights(orders.model_version, orders.oldest_version)

    async def _switch_later(self, orders: IngressOrders) -> None:
        await asyncio.sleep(orders.switch_in_s)
        with suppress(PeerLost):  # the next report tries again
            await self._streams.use_weights(orders.model_version, orders.oldest_version)

    def _drain(self, drain_s: float) -> None:
        """Drains, and ends open requests in ``drain_s`` seconds; a later order may only shorten that."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + drain_s
        self._readiness.is_draining = True
        if self._end is not None and ends_at >= self._ends_at:
            return
        if self._end is not None:
            self._end.cancel()
        self._ends_at, self._end = ends_at, loop.call_at(ends_at, self._streams.end_streams, STOPPED)


EXCHANGE_S = 0.25
"""Seconds between two reports while tenants send requests."""

TIMEOUT_S = 1.0


class TenantExchange:
    """Reports the counts of access control, and corrects its budgets by the answers.

    While no Supervisor answers, access control goes on with the budgets it has; the next report holds all counts since.

    Args:
        ingress_id: Names this life of the ingress replica.
    """

    def __init__(self, peers: PeerBook, ingress_id: str | None = None) -> None:
        self._supervisor = peers.supervisor()
        self._ingress_id = ingress_id or uuid.uuid4().hex
        self._epoch = ""

    async def run(self, access: AccessControl) -> None:
        """Reports until it is cancelled."""
        while True:
            await self.exchange(access)
            await asyncio.sleep(EXCHANGE_S)

    async def exchange(self, access: AccessControl) -> None:
        """Sends one report, if there is anything to report."""
        counts = tuple(access.take_due())
        if not counts:
            return
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answer = await self._supervisor.count_tenants(TenantReport(self._ingress_id, self._epoch, counts))
        except (PeerLost, TimeoutError):
            access.not_reported(counts)
            return
        except FarsightError:
            access.not_reported(counts)
            logger.exception("the Supervisor took no counts of tenants")
            return
        self._epoch = answer.epoch
        access.correct(answer, counts)

    async def usage(self) -> tuple[TenantUsage, ...]:
        """Sums of all tenants over all ingress replicas.

        Raises:
            FarsightError: The Supervisor does not answer now.
        """
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return (await self._supervisor.tenant_usage()).tenants
        except (PeerLost, TimeoutError) as error:
            raise FarsightError("the Supervisor does not answer") from error


TRAFFIC_REPORT_S = 0.5
"""Seconds between two reports: half of a point of the history, so that each point holds the counts of its second."""


class TrafficReports:
    """Sends counts since the start of the replica, so that a lost report loses nothing.

    Args:
        ingress_id: As in the name of the replica's component.
    """

    def __init__(self, peers: PeerBook, tally: TrafficTally, ingress_id: str) -> None:
        self._supervisor = peers.supervisor()
        self._tally = tally
        self._ingress_id = ingress_id

    async def run(self) -> None:
        """Reports until it is cancelled."""
        while True:
            await self.report()
            await asyncio.sleep(TRAFFIC_REPORT_S)

    async def report(self) -> None:
        """Sends one report; without a Supervisor, the next report holds its counts."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._supervisor.count_traffic(self._tally.counts(self._ingress_id))
        except (PeerLost, TimeoutError):
            return
        except FarsightError:
            logger.exception("the Supervisor took no counts of traffic")
