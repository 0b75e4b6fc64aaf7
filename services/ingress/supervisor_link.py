"""The exchange of an ingress replica with the Supervisor: whether it watches the service, and when to drain."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Protocol

from actors.runtime.peer import LOOK_AGAIN_S, PeerBook, PeerLost
from core.messages.supervision import IngressOrders, IngressReport
from services.api.readiness import Readiness

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
