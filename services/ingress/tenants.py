"""The exchange of an ingress replica with the Supervisor about tenants; no request waits for it."""

from __future__ import annotations

import asyncio
import logging
import uuid

from actors.runtime.peer import PeerBook, PeerLost
from core.errors import FarsightError
from core.messages.tenants import TenantReport, TenantUsage
from services.api.access.access_control import AccessControl

EXCHANGE_S = 0.25
"""Seconds between two reports while tenants send requests."""

TIMEOUT_S = 1.0

logger = logging.getLogger(__name__)


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
