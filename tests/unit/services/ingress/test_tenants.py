"""The exchange of ingress replicas with the Supervisor: lost reports are reported again, and no door waits."""

from __future__ import annotations

from typing import Any, cast

import pytest

from actors.runtime.peer import PeerBook, PeerLost
from core.errors import FarsightError
from core.messages.tenants import TenantBudgets, TenantReport, TenantUsages
from policies.tenancy.budgets import SharedBudgets
from services.api.access.door import Door, DoorSettings
from services.api.access.keys import Tenant
from services.ingress.tenants import TenantExchange

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


def replica(supervisor: SupervisorAway) -> tuple[Door, TenantExchange]:
    exchange = TenantExchange(cast(PeerBook, supervisor))
    return Door(DoorSettings(api_key="k" * 32), now=lambda: 0.0, usage=exchange.usage), exchange


def admitted(door: Door, count: int) -> int:
    return sum(door.admit(TENANT)[1] is None for _ in range(count))


@pytest.mark.parametrize("error", [PeerLost("gone"), TimeoutError(), FarsightError("a defect")])
async def test_what_was_not_heard_is_said_again(error: Exception) -> None:
    supervisor = SupervisorAway()
    (first, one), (second, other) = replica(supervisor), replica(supervisor)
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
    door, exchange = replica(supervisor)
    assert admitted(door, 20) == 10
    await exchange.exchange(door)
    assert [(row.tenant, row.requests, row.rejected) for row in await door.usage()] == [("t", 10, 10)]


async def test_nothing_is_reported_while_nothing_happens() -> None:
    supervisor = SupervisorAway()
    door, exchange = replica(supervisor)
    await exchange.exchange(door)
    budget, _ = door.admit(TENANT)
    budget.done(0.0)
    await exchange.exchange(door)
    await exchange.exchange(door)
    assert len(supervisor.reports) == 1
