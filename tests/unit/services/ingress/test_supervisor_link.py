"""What an ingress replica and the Supervisor tell each other: orders, and what tenants use; and how it goes without."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from farsight.actors.runtime.peer import PeerBook, PeerLost
from farsight.core.errors import FarsightError
from farsight.core.messages.supervision import IngressOrders, IngressReport
from farsight.core.messages.tenants import TenantBudgets, TenantReport, TenantUsages
from farsight.policies.tenancy.budgets import SharedBudgets
from farsight.services.api.access.access_control import AccessControl, AccessSettings
from farsight.services.api.access.keys import Tenant
from farsight.services.api.readiness import Readiness
from farsight.services.ingress import supervisor_link
from farsight.services.ingress.supervisor_link import STOPPED, SUPERVISED_S, SupervisorLink, TenantExchange


class Overseer:
    """Answers reports as a Supervisor does."""

    def __init__(self) -> None:
        self.orders: IngressOrders | None = IngressOrders()
        self.reports: list[IngressReport] = []

    def supervisor(self) -> Overseer:
        return self

    async def report_ingress(self, report: IngressReport) -> IngressOrders:
        if self.orders is None:
            raise PeerLost("supervisor")
        self.reports.append(report)
        return self.orders


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class OpenStreams:
    """Notes what is done to open requests."""

    ingress_id = "abcd1234"

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.model_version, self.oldest_version, self.oldest_served = 0, 0, 0

    async def use_weights(self, version: int, oldest: int) -> None:
        self.model_version, self.oldest_served = version, oldest

    def use_limits(self, limits: str) -> None:
        self.limits = limits

    def end_streams(self, reason: str) -> None:
        self.ended.append(reason)


def replica() -> tuple[Overseer, Readiness, Clock, OpenStreams, SupervisorLink]:
    overseer, clock, streams = Overseer(), Clock(), OpenStreams()
    readiness = Readiness(SUPERVISED_S, clock)
    requests = cast(supervisor_link.OpenRequests, streams)
    return overseer, readiness, clock, streams, SupervisorLink(cast(PeerBook, overseer), readiness, requests)


async def test_who_hears_no_supervisor_is_not_supervised() -> None:
    overseer, readiness, clock, _, link = replica()
    overseer.orders = None
    clock.now = SUPERVISED_S
    await link.report()
    assert not readiness.is_supervised
    overseer.orders = IngressOrders()
    await link.report()
    assert readiness.is_supervised and not readiness.is_draining


async def test_an_order_is_kept_without_the_supervisor_and_ends_what_is_left() -> None:
    overseer, readiness, _, streams, link = replica()
    readiness.num_open = 2
    overseer.orders = IngressOrders(1000.0)
    await link.report()
    overseer.orders = IngressOrders()  # of a new Supervisor that knows nothing of it yet
    await link.report()
    assert readiness.is_draining and not streams.ended
    assert [report.is_draining for report in overseer.reports] == [False, True]
    overseer.orders = IngressOrders(0.0)
    await link.report()
    overseer.orders = IngressOrders(500.0)
    await link.report()
    await asyncio.sleep(0.01)
    assert streams.ended == [STOPPED]


async def test_replicas_that_hear_of_new_weights_one_after_the_other_switch_at_one_instant() -> None:
    """The one that hears first waits; one that begins meanwhile takes no request before; one that hears late does so
    at once."""
    overseer, _, _, first, link = replica()
    overseer.orders = IngressOrders(model_version=1, switch_in_s=1000.0)
    await link.report()
    assert first.model_version == 0
    newcomer, _, _, streams, beginning = replica()
    newcomer.orders = overseer.orders
    joining = asyncio.create_task(beginning.join())
    overseer.orders = IngressOrders(model_version=1, switch_in_s=0.01)
    await link.report()
    assert first.model_version == 0 and not joining.done()
    assert link._switch is not None
    await link._switch
    assert first.model_version == 1
    newcomer.orders = IngressOrders(model_version=1)
    await joining
    assert streams.model_version == 1
    overseer.orders = IngressOrders(model_version=1, switch_in_s=500.0, oldest_version=1)
    await link.report()
    assert (first.model_version, first.oldest_served) == (1, 1), "it has switched already"


async def test_new_requests_follow_the_weights_that_the_supervisor_names() -> None:
    overseer, _, _, streams, link = replica()
    overseer.orders = IngressOrders(model_version=2, oldest_version=1)
    await link.join()
    assert (streams.model_version, streams.oldest_served) == (2, 1)
    streams.oldest_version = 1
    await link.report()
    assert [(each.model_version, each.oldest_version) for each in overseer.reports] == [(0, 0), (2, 1)]


TENANT = Tenant("t", requests_per_minute=10)


class SupervisorAway:
    """Counts as the Supervisor does while it is there."""

    def __init__(self) -> None:
        self.shared = SharedBudgets("life")
        self.error: Exception | None = None
        self.reports: list[TenantReport] = []

    def supervisor(self) -> SupervisorAway:
        return self

    async def count_tenants(self, report: TenantReport) -> TenantBudgets:
        self.reports.append(report)
        if self.error is not None:
            raise self.error
        return self.shared.report(report, 0.0)

    async def tenant_usage(self) -> TenantUsages:
        if self.error is not None:
            raise self.error
        return TenantUsages(self.shared.usage(0.0))


def exchanging(supervisor: SupervisorAway) -> tuple[AccessControl, TenantExchange]:
    exchange = TenantExchange(cast(PeerBook, supervisor))
    return AccessControl(AccessSettings(api_key="k" * 32), now=lambda: 0.0, usage=exchange.usage), exchange


def admitted(access: AccessControl, count: int) -> int:
    return sum(access.admit(TENANT)[1] is None for _ in range(count))


@pytest.mark.parametrize("error", [PeerLost("gone"), TimeoutError(), FarsightError("a defect")])
async def test_what_was_not_heard_is_said_again(error: Exception) -> None:
    supervisor = SupervisorAway()
    (first, one), (second, other) = exchanging(supervisor), exchanging(supervisor)
    supervisor.error = error
    assert admitted(first, 6) == 6
    await one.exchange(first)
    supervisor.error = None
    await one.exchange(first)
    await one.exchange(first)  # six are in flight, so they are told of again, and counted once
    assert admitted(second, 1) == 1
    await other.exchange(second)
    assert admitted(second, 20) == 3
    usage: Any = {row.tenant: row.requests for row in await first.usage()}
    assert usage == {"t": 7}  # of the last exchange


async def test_without_a_supervisor_a_door_goes_on_alone() -> None:
    supervisor = SupervisorAway()
    supervisor.error = PeerLost("gone")
    access, exchange = exchanging(supervisor)
    assert admitted(access, 20) == 10
    await exchange.exchange(access)
    assert [(row.tenant, row.requests, row.rejected) for row in await access.usage()] == [("t", 10, 10)]


async def test_nothing_is_reported_while_nothing_happens() -> None:
    supervisor = SupervisorAway()
    access, exchange = exchanging(supervisor)
    await exchange.exchange(access)
    budget, _ = access.admit(TENANT)
    budget.done(0.0)
    await exchange.exchange(access)
    await exchange.exchange(access)
    assert len(supervisor.reports) == 1
