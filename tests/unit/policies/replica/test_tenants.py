"""Tenants at a replica's scheduler: whose request is admitted, what restarts keep, what one tenant alone changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.messages.plans import SlotProgress, StepReport, TenantService
from core.request import Request
from policies.replica.events import RequestsAborted, WorkerConnected, WorkerReported
from tests.unit.policies.replica.scheduler_harness import LEASE, Harness, request, running, state, waiting


def of(tenant: str, number: int, **fields: int) -> Request:
    return replace(request(f"{tenant}{number}"), tenant=tenant, **fields)  # type: ignore[arg-type]


def told(h: Harness, seq: int, *progress: SlotProgress, sums: dict[str, float], ended: tuple[str, ...] = ()) -> None:
    services = tuple(TenantService(tenant, gpu_s) for tenant, gpu_s in sums.items())
    base = state(*(()), ended=ended).report
    report = StepReport(
        "w", LEASE, h.first_report + seq, h.plans[-1].plan_seq, 0, 0, progress, base.finished, (), services=services
    )
    h.handle(WorkerReported(report))


def test_the_least_served_tenant_is_admitted_next() -> None:
    h = Harness(max_num_seqs=1, standby_slots=1)
    h.arrive(*(of("a", number) for number in range(3)), of("b", 0))
    assert h.admitted == ["a0"]
    assert h.standby == ["b0"], "a0 runs: the next place is the other tenant's"
    told(h, 1, running("a0", 1, 2), sums={"a": 0.5})
    told(h, 2, ended=("a0",), sums={"a": 0.7})
    assert h.admitted == ["b0"]


def test_a_class_goes_before_shares() -> None:
    h = Harness(max_num_seqs=1, standby_slots=1)
    h.arrive(of("a", 0), of("a", 1, priority=-1), of("b", 0))
    assert h.admitted == ["a1"]


def test_what_ended_or_was_aborted_between_two_reports_is_charged() -> None:
    h = Harness(max_num_seqs=1, standby_slots=0)
    h.arrive(of("a", 0), of("b", 0), of("b", 1))
    h.handle(RequestsAborted((("a0", 0),)))
    h.arrive(of("a", 1))
    told(h, 1, running("b0", 1, 2), sums={"a": 3.0, "b": 0.5})  # the cancelled one's steps
    assert h.scheduler.shares.counters["a"] - h.scheduler.shares.counters["b"] == pytest.approx(2.5)


def test_a_new_scheduler_begins_with_equal_counters() -> None:
    """The worker's sums from before are its zero; what comes on top is charged."""
    held = [(of("a", 0), running("a0", 1, 2)), (of("b", 0), waiting("b0"))]
    before = state(*held)
    services = (TenantService("a", 100.0), TenantService("b", 3.0))
    h = Harness(worker=replace(before, report=replace(before.report, services=services)))
    counters = h.scheduler.shares.counters
    assert counters["a"] == counters["b"]
    told(h, 1, running("a0", 2, 2), waiting("b0"), sums={"a": 101.0})
    assert counters["a"] - counters["b"] == pytest.approx(1.0)


def test_a_new_worker_counts_from_zero_and_gives_no_credit() -> None:
    """All requests leave and come back, so the counters may be level."""
    h = Harness(max_num_seqs=1)
    h.arrive(of("a", 0), of("b", 0))
    told(h, 1, running("a0", 1, 2), sums={"a": 2.0})
    h.handle(WorkerConnected(state(lease=LEASE)))
    counters = h.scheduler.shares.counters
    ahead = counters["a"] - counters["b"]
    assert 0 <= ahead <= 2.0
    told(h, 1, running("b0", 1, 2), sums={"b": 0.5})
    assert counters["a"] - counters["b"] == pytest.approx(ahead - 0.5)


@pytest.mark.parametrize("preset", ["fcfs", "fastserve", "past-future", "preble", "farsight"])
def test_one_tenant_is_scheduled_as_none(preset: str) -> None:
    """The same plans, byte for byte, whatever the tenant's name, weight and sums."""
    plans = []
    for tenant in ("", "acme"):
        h = Harness(max_num_seqs=2, preset=preset)
        h.arrive(*(replace(request(f"r{number}"), tenant=tenant) for number in range(5)))
        told(h, 1, running("r0", 1, 2), running("r1", 1, 2), sums={tenant: 1.0})
        told(h, 2, running("r1", 2, 2), ended=("r0",), sums={tenant: 2.5})
        plans.append([[(slot.request_id, slot.standby, slot.length_to) for slot in plan.slots] for plan in h.plans])
    assert plans[0] == plans[1]
