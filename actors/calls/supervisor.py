"""Messages to the Supervisor, and to the processes that host components."""

from __future__ import annotations

from typing import Protocol

from farsight.actors.calls.message import message
from farsight.core.messages.series import (
    Activities,
    ComponentsQuery,
    ComponentsReply,
    NamesQuery,
    RecentReply,
    SeriesQuery,
    SeriesReply,
    TableReply,
    TrafficCounts,
)
from farsight.core.messages.status import ComponentCounts, ComponentRows, Scale, SeenService, StartState
from farsight.core.messages.supervision import (
    DrainProgress,
    DrainReplica,
    DrainService,
    IngressOrders,
    IngressReport,
    ServedWeights,
    Upgrade,
)
from farsight.core.messages.tenants import TenantBudgets, TenantReport, TenantUsages


class SupervisorCalls(Protocol):
    """The Supervisor."""

    @message(long=True)
    async def started(self) -> None:
        """Returns once every component has started once; raises FarsightError if a component cannot start."""

    @message()
    async def start_state(self) -> StartState:
        """Returns which hosts have started and which ones ``started`` still waits for."""

    @message()
    async def counts(self) -> ComponentCounts:
        """Returns the desired number of components of each kind."""

    @message(long=True)
    async def scale(self, scale: Scale) -> ComponentCounts:
        """Sets the number of components of a kind; returns when they are ready or removed. Raises MessageError for an
        unknown kind or an impossible number."""

    @message(long=True)
    async def drain_replica(self, order: DrainReplica) -> ComponentCounts:
        """Takes a replica out or back; returns when done. Raises MessageError if it is unknown or the last one left."""

    @message(long=True)
    async def upgrade(self, order: Upgrade) -> ServedWeights:
        """Rolls out new weights or settings; returns when every replica runs them. Raises FarsightError if the upgrade
        fails, so that every replica runs the old version again, or if another upgrade is under way."""

    @message()
    async def report_ingress(self, report: IngressReport) -> IngressOrders:
        """Takes an ingress replica's sign of life; returns its orders."""

    @message()
    async def drain_service(self, order: DrainService) -> DrainProgress:
        """Has every ingress replica refuse new requests; returns the progress. The caller repeats the message."""

    @message()
    async def count_tenants(self, report: TenantReport) -> TenantBudgets:
        """Returns the budget left for each tenant in the report, over all ingress replicas."""

    @message()
    async def tenant_usage(self) -> TenantUsages:
        """Sums by tenant over all ingress replicas."""

    @message()
    async def count_traffic(self, counts: TrafficCounts) -> None:
        """Takes the counts of an ingress replica, for the history of the service."""

    @message()
    async def seen(self) -> SeenService | None:
        """Returns the last observation of the service; None if the observation is old or incomplete."""

    @message()
    async def series(self, query: SeriesQuery) -> SeriesReply:
        """Returns the history of the service."""

    @message()
    async def replica_series(self, query: SeriesQuery) -> TableReply:
        """Returns the loads of the replicas over time."""

    @message()
    async def component_series(self, query: ComponentsQuery) -> ComponentsReply:
        """Returns queues, rates, health and restarts of the components of a kind over time."""


class HostCalls(Protocol):
    """A process with components."""

    @message()
    async def rows(self) -> ComponentRows:
        """Returns the current status of every component of the process."""

    @message()
    async def activity(self, query: NamesQuery) -> Activities:
        """Returns the current status of the named components of the process and their counts since their start."""

    @message()
    async def recent(self, query: NamesQuery) -> RecentReply:
        """Returns the last decisions of the named components of the process."""
