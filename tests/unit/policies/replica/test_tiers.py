"""Flex requests and due ones at a replica's scheduler."""

from __future__ import annotations

from dataclasses import replace

from core.costs import StepCost
from core.request import FLEX, Request, Slo
from policies.replica.events import CostLearned, RequestsArrived
from tests.unit.policies.replica.scheduler_harness import Harness, request, running


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


def test_a_wish_that_can_wait_changes_nothing() -> None:
    h = Harness(max_num_seqs=1, standby_slots=2)
    h.handle(CostLearned(StepCost(0.01, 0.0, 0.0, 0.0)))
    h.handle(RequestsArrived((request("a"), request("b"), replace(request("c"), slo=Slo(ttft_s=60.0)))))
    assert (h.admitted, h.standby) == (["a"], ["b", "c"])
    h.now += 60
    h.report(1, running("a", 1, 2))
    assert h.admitted[0] == "c"
