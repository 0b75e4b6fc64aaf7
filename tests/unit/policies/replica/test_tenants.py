"""Tenants, flex requests and due ones at a replica's scheduler."""

from __future__ import annotations

from dataclasses import replace

import pytest

from farsight.core.costs import StepCost
from farsight.core.messages.plans import SlotProgress, StepReport, TenantService
from farsight.core.request import FLEX, Request, Slo
from farsight.policies.replica.events import (
    CostLearned,
    RequestsAborted,
    RequestsArrived,
    WorkerConnected,
    WorkerReported,
)
from tests.unit.policies.replica.scheduler_harness import LEASE, Harness, request, running, state, waiting


def of(tenant: str, number: int, **fields: int) -> Request:
    return replace(request(f"{tenant}{number}"), tenant=tenant, **fields)  # type: ignore[arg-type]


def reported(
    h: Harness, seq: int, *progress: SlotProgress, sums: dict[str, float], ended: tuple[str, ...] = ()
) -> None:
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
    reported(h, 1, running("a0", 1, 2), sums={"a": 0.5})
    reported(h, 2, ended=("a0",), sums={"a": 0.7})
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
    reported(h, 1, running("b0", 1, 2), sums={"a": 3.0, "b": 0.5})  # the cancelled one's steps
    assert h.scheduler.shares.counters["a"] - h.scheduler.shares.counters["b"] == pytest.approx(2.5)


def test_a_new_scheduler_begins_with_equal_counters() -> None:
    """The worker's sums from before are its zero; what comes on top is charged."""
    held = [(of("a", 0), running("a0", 1, 2)), (of("b", 0), waiting("b0"))]
    before = state(*held)
    services = (TenantService("a", 100.0), TenantService("b", 3.0))
    h = Harness(worker=replace(before, report=replace(before.report, services=services)))
    counters = h.scheduler.shares.counters
    assert counters["a"] == counters["b"]
    reported(h, 1, running("a0", 2, 2), waiting("b0"), sums={"a": 101.0})
    assert counters["a"] - counters["b"] == pytest.approx(1.0)


def test_a_new_worker_counts_from_zero_and_gives_no_credit() -> None:
    """All requests leave and come back, so the counters may be level."""
    h = Harness(max_num_seqs=1)
    h.arrive(of("a", 0), of("b", 0))
    reported(h, 1, running("a0", 1, 2), sums={"a": 2.0})
    h.handle(WorkerConnected(state(lease=LEASE)))
    counters = h.scheduler.shares.counters
    ahead = counters["a"] - counters["b"]
    assert 0 <= ahead <= 2.0
    reported(h, 1, running("b0", 1, 2), sums={"b": 0.5})
    assert counters["a"] - counters["b"] == pytest.approx(ahead - 0.5)


@pytest.mark.parametrize("preset", ["fcfs", "fastserve", "past-future", "preble", "farsight"])
def test_one_tenant_is_scheduled_as_none(preset: str) -> None:
    """The same plans, byte for byte, whatever the tenant's name, weight and sums."""
    plans = []
    for tenant in ("", "acme"):
        h = Harness(max_num_seqs=2, preset=preset)
        h.arrive(*(replace(request(f"r{number}"), tenant=tenant) for number in range(5)))
        reported(h, 1, running("r0", 1, 2), running("r1", 1, 2), sums={tenant: 1.0})
        reported(h, 2, running("r1", 2, 2), ended=("r0",), sums={tenant: 2.5})
        plans.append([[(slot.request_id, slot.standby, slot.length_to) for slot in plan.slots] for plan in h.plans])
    assert plans[0] == plans[1]


def flex(name: str, prompt: int = 4, out: int = 4) -> Request:
    return replace(request(name, prompt, out), priority=FLEX)


def resting(h: Harness) -> list[str]:
    return [slot.request_id for slot in h.plans[-1].slots if slot.rests]


def test_flex_rests_while_another_has_no_token_yet_and_goes_on_then() -> None:
    h = Harness()
    h.arrive(flex("f"))
    h.report(1, running("f", 1, 2))
    h.arrive(request("a"))
    assert h.admitted == ["a", "f"] and resting(h) == ["f"]
    h.report(2, running("f", 1, 2), running("a", 1, 2))
    assert h.admitted == ["a", "f"] and resting(h) == []


def test_flex_is_no_standby_and_begins_when_all_others_stream() -> None:
    h = Harness(max_num_seqs=2, standby_slots=2)
    h.arrive(request("a"), flex("f"), request("b"))
    assert (h.admitted, h.standby) == (["a", "b"], [])
    h.report(1, running("a", 1, 2), running("b", 1, 2))
    assert h.admitted == ["a", "b"], "there is no place"
    h.report(2, running("a", 2, 2), ended=("b",))
    assert h.admitted == ["a", "f"]


def test_flex_kv_that_is_in_the_way_is_dropped_in_the_same_plan() -> None:
    """Ten blocks of four tokens: one of the two flex requests has to go for a prompt of 16."""
    h = Harness()
    h.arrive(flex("f", 12, 8), flex("g", 12, 8))
    h.report(1, running("f", 1, 4), running("g", 1, 4))
    h.arrive(request("a", 16, 4))
    slots = {slot.request_id: slot for slot in h.plans[-1].slots}
    assert [slots[name].num_preemptions for name in ("a", "f", "g")] == [0, 0, 1]
    assert slots["f"].rests and slots["g"].rests and slots["g"].standby and not slots["a"].standby


def test_a_due_request_takes_a_place_of_its_own_tenant_only() -> None:
    h = Harness(max_num_seqs=2, standby_slots=0)
    h.handle(CostLearned(StepCost(0.01, 0.0, 0.0, 0.0)))
    h.arrive(replace(request("a0"), tenant="a"), replace(request("b0"), tenant="b"))
    h.report(1, running("a0", 1, 2), running("b0", 1, 2))
    h.arrive(replace(request("c1"), tenant="c", deadline_s=1e-3))
    assert "c1" not in h.admitted, "no tenant gives way to another's deadline"
    h.arrive(replace(request("b1"), tenant="b", deadline_s=1e-3))
    assert h.admitted[:2] == ["a0", "b1"] and set(h.admitted) == {"a0", "b1", "b0"}
    h.report(2, running("a0", 2, 2), running("b0", 1, 2), ended=("b1",))
    assert h.admitted[:2] == ["a0", "b0"], "it keeps its place behind the others, and goes on"


def test_a_target_that_can_wait_changes_nothing() -> None:
    h = Harness(max_num_seqs=1, standby_slots=2)
    h.handle(CostLearned(StepCost(0.01, 0.0, 0.0, 0.0)))
    h.handle(RequestsArrived((request("a"), request("b"), replace(request("c"), slo=Slo(ttft_s=60.0)))))
    assert (h.admitted, h.standby) == (["a"], ["b", "c"])
    h.now += 60
    h.report(1, running("a", 1, 2))
    assert h.admitted[0] == "c"
