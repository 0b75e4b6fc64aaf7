"""The exchange of an ingress replica with the Supervisor: whether it watches, when to drain, tenants and traffic.

And the open requests by the version of the weights that they run on, which the Supervisor switches.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import math
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress

from farsight.actors.calls.scheduling import RouterCalls
from farsight.actors.runtime.peer import LOOK_AGAIN_S, PeerBook, PeerLost
from farsight.core.config.load import FarsightConfig
from farsight.core.config.rolling import changed
from farsight.core.errors import FarsightError
from farsight.core.messages.supervision import IngressOrders, IngressReport
from farsight.core.messages.tenants import TenantReport, TenantUsage
from farsight.core.request import Request
from farsight.core.series.tally import TrafficTally
from farsight.services.api.access.access_control import AccessControl
from farsight.services.api.backend import ModelInfo
from farsight.services.api.readiness import Readiness
from farsight.services.ingress.first_check import FirstCheck
from farsight.services.ingress.ledger import RequestLedger
from farsight.services.ingress.streams import ClientStream, fail_stream

logger = logging.getLogger(__name__)

REPORT_S = 0.5
"""Seconds between two reports."""

SUPERVISED_S = 5.0
"""Seconds without an answer of the Supervisor after which an ingress replica is unhealthy: dead components are not
replaced then."""

STOPPED = "the server is stopping, and the time for requests to end is over"
REPLACED = "its weights were replaced, and the time for it to end is over"


class OpenRequests:
    """The open requests of an ingress replica, as the Supervisor asks about them, switches their weights and ends them.

    Args:
        model: What clients may know about the model.
        first_check: The check of new requests, whose limits may change.
        streams: The open requests by id, as their owner opens and closes them.
        ledger: Knows which of them have ended.
        router: Answers which model runs now.
        wake: Called when there is a message for the Router.

    Attributes:
        model_version: Version of the weights that new requests run on.
    """

    def __init__(
        self,
        config: FarsightConfig,
        model: ModelInfo,
        first_check: FirstCheck,
        streams: Mapping[str, ClientStream],
        ledger: RequestLedger,
        router: RouterCalls,
        wake: Callable[[], None],
    ) -> None:
        self.model, self.model_version = model, 0
        self.ingress_id = ledger.ingress_id
        self._config = config
        self._first_check = first_check
        self._streams = streams
        self._ledger = ledger
        self._router = router
        self._wake = wake
        self._limits_changed = "{}"
        self._oldest_served = 0

    def use_limits(self, limits: str) -> None:
        """Checks new requests by these settings instead of the start's; by section, as JSON."""
        if limits != self._limits_changed:
            self._first_check.limits = changed(self._config, json.loads(limits)).server
            self._limits_changed = limits

    @property
    def deadline_s(self) -> float:
        """Seconds within which another server has to send a first token."""
        return self._first_check.limits.first_token_deadline_s if self._config.replica else math.inf

    @property
    def own_deadline_s(self) -> float:
        """Seconds within which any request has to have a first token."""
        limits = self._first_check.limits
        return limits.max_wait_s + limits.first_token_deadline_s if limits.max_wait_s else math.inf

    @property
    def oldest_version(self) -> int:
        """The lowest version of the weights of an open request; the version of new requests if none is open."""
        return min((each.request.model_version for each in self._streams.values()), default=self.model_version)

    async def use_weights(self, version: int, oldest: int) -> None:
        """Runs new requests on this version; ends requests on weights below ``oldest`` with an error.

        Raises:
            PeerLost: The Router does not answer; nothing has changed.
        """
        if (version, oldest) == (self.model_version, self._oldest_served):
            return
        served = await self._router.model()
        if served is not None:  # the model may hold longer or shorter sequences
            ready = served.ready
            length, pool_limited = ready.max_model_len, ready.pool_limited
            self.model = dataclasses.replace(self.model, max_model_len=length, pool_limited=pool_limited)
        self.model = dataclasses.replace(self.model, version=version)
        self.model_version, self._oldest_served = version, oldest
        self.end_streams(REPLACED, oldest)

    def is_replaced(self, request: Request) -> bool:
        """Returns whether a request to resume began with weights that no replica runs any more."""
        return bool(request.output_ids) and request.model_version < self._oldest_served

    def end_streams(self, reason: str, oldest: int | None = None) -> None:
        """Ends every open request with an error, or only requests on weights below version ``oldest``."""
        for stream in list(self._streams.values()):
            request = stream.request
            if oldest is not None and request.model_version >= oldest:
                continue
            if self._ledger.replica_of(request.request_id) is not None:  # else its end is on its way
                self._ledger.close(request.request_id, time.monotonic())
                fail_stream(stream, stream.attempts, reason)
        self._wake()


class SupervisorLink:
    """Reports to the Supervisor until it is cancelled.

    Once it has heard that the service drains, it refuses new requests for the rest of its life. At the time that it was
    told it ends all open requests. Neither needs a living Supervisor.

    Args:
        streams: The open requests, and the weights for new ones.
    """

    def __init__(self, peers: PeerBook, readiness: Readiness, streams: OpenRequests) -> None:
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
    """

    def __init__(self, peers: PeerBook) -> None:
        self._supervisor = peers.supervisor()
        self._ingress_id = uuid.uuid4().hex  # names this life of the ingress replica
        self._epoch = ""

    async def run(self, access: AccessControl) -> None:
        """Reports until it is cancelled."""
        while True:
            await self.exchange(access)
            await asyncio.sleep(EXCHANGE_S)

    async def exchange(self, access: AccessControl) -> None:
        """Reads a changed key file; sends one report, if there is anything to report."""
        access.refresh()
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
