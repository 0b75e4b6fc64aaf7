"""What the Supervisor answers."""

from __future__ import annotations

from typing import Protocol

from actors.calls.message import message
from core.messages.drains import DrainProgress, DrainReplica, DrainService, IngressOrders, IngressReport
from core.messages.series import ComponentsQuery, ComponentsReply, SeriesQuery, SeriesReply, TableReply, TrafficCounts
from core.messages.status import ComponentCounts, Scale, SeenService, StartState
from core.messages.tenants import TenantBudgets, TenantReport, TenantUsages
from core.messages.weights import ServedWeights, Upgrade


class SupervisorCalls(Protocol):
    """The Supervisor."""

    @message(long=True)
    async def started(self) -> None:
        """Answers once every component has started once; raises FarsightError if one cannot start."""

    @message()
    async def start_state(self) -> StartState:
        """How far ``started`` is."""

    @message()
    async def counts(self) -> ComponentCounts:
        """How many components of each kind there should be."""

    @message(long=True)
    async def scale(self, scale: Scale) -> ComponentCounts:
        """Answers when all is up, or drained and gone. Raises MessageError: an unknown kind or an impossible number."""

    @message(long=True)
    async def drain_replica(self, order: DrainReplica) -> ComponentCounts:
        """Answers when the replica is out, or back. Raises MessageError: there is none, or none would be left."""

    @message(long=True)
    async def upgrade(self, order: Upgrade) -> ServedWeights:
        """Answers when every replica runs the new weights. Raises FarsightError: none does, or one is under way."""

    @message()
    async def report_ingress(self, report: IngressReport) -> IngressOrders:
        """An ingress replica lives, and asks what it should do."""

    @message()
    async def drain_service(self, order: DrainService) -> DrainProgress:
        """Has every ingress replica refuse new requests; says how far that is. To be repeated."""

    @message()
    async def count_tenants(self, report: TenantReport) -> TenantBudgets:
        """What is left for each tenant in the report, over all ingress replicas."""

    @message()
    async def tenant_usage(self) -> TenantUsages:
        """Sums by tenant over all ingress replicas."""

    @message()
    async def count_traffic(self, counts: TrafficCounts) -> None:
        """What an ingress replica has counted, for the history of the service."""

    @message()
    async def seen(self) -> SeenService | None:
        """The service as it was when the last second ended; None if that is not known of all of it."""

    @message()
    async def series(self, query: SeriesQuery) -> SeriesReply:
        """The history of the service."""

    @message()
    async def replica_series(self, query: SeriesQuery) -> TableReply:
        """The loads of the replicas over time."""

    @message()
    async def component_series(self, query: ComponentsQuery) -> ComponentsReply:
        """Queues, rates, health and restarts of the components of a kind over time."""
