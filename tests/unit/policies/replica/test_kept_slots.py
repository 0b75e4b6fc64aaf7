"""Slots of requests that wait on a worker beyond the standby window are written once, not at each plan."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.decisions.deep_queue import arrivals
from core.messages.plans import Slot
from policies.compose import build_scheduler
from policies.replica.events import Event, Instruction, SendPlan
from policies.replica.scheduler import SchedulerLimits
from policies.settings import PolicySettings
from simulator.cluster.latency import A100_7B
from simulator.cluster.records import Record, Recorder
from simulator.cluster.replica import Replica, ReplicaShape
from simulator.traffic.workload import as_request

STANDBY = 3


def test_a_slot_is_the_same_object_until_its_orders_or_its_slice_change() -> None:
    scheduler = build_scheduler(
        "fastserve-recompute", SchedulerLimits(12, STANDBY), PolicySettings(gamma=0.0, cost=A100_7B.cost)
    )
    handle, source = scheduler.handle, arrivals(1)
    last: dict[str, Slot] = {}
    num_kept = num_same = 0

    def heard(event: Event, now: float) -> list[Instruction]:
        nonlocal num_kept, num_same, last
        out = handle(event, now)
        for plan in (each.plan for each in out if isinstance(each, SendPlan)):
            standby = [slot for slot in plan.slots if slot.standby]
            for slot in standby[STANDBY:]:
                before = last.get(slot.request_id)
                if before is None or not before.standby or before.request is not None:
                    continue
                num_kept += 1
                num_same += before is slot
                if before is not slot:
                    assert before != slot, "written again though it says the same"
            last = {slot.request_id: slot for slot in plan.slots}
        scheduler.check_integrity()
        return out

    scheduler.handle = heard  # type: ignore[method-assign]
    shape = ReplicaShape(150, 16, 0, 12, 512, look_every=1)
    replica = Replica("0", scheduler, shape, A100_7B, Recorder(), lambda *_: None, lambda *_: None)
    changed = [
        replace(each, prompt_len=min(each.prompt_len, 600), output_len=min(each.output_len, 80))
        for each, _ in zip(source, range(40), strict=False)
    ]
    replica.submit([(as_request(each), Record(each)) for each in changed], 0.0)
    for _ in range(200):
        if replica.wakes_at < float("inf"):
            replica.wake(replica.wakes_at)
    assert num_kept > 100, (num_kept, num_same)
    assert num_same > 0.9 * num_kept, (num_kept, num_same)
