"""Hand-made plans, and what a step of them comes to."""

from __future__ import annotations

from farsight.core.messages.plans import Plan, Slot
from farsight.core.request import Request, SamplingParams
from farsight.kvcache import PlanExecutor


def slot(
    name: str,
    prompt: int = 4,
    out: int = 4,
    *,
    prefill_to: int = 1000,
    length_to: int = 1000,
    standby: bool = False,
    preemptions: int = 0,
    payload: bool = True,
    attempt: int = 0,
    resumed: int = 0,
) -> Slot:
    request = Request(name, attempt, "i", (1,) * prompt, SamplingParams(out), (2,) * resumed) if payload else None
    return Slot(name, attempt, prefill_to, length_to, standby, preemptions, request)


def plan(seq: int, *slots: Slot, as_of: int = 0, reserve: int = 0, incarnation: str = "w", lease: int = 0) -> Plan:
    return Plan(incarnation, lease, seq, as_of, reserve, slots)


def step(worker: PlanExecutor, stopped: tuple[str, ...] = ()) -> dict[str, tuple[int, int, bool]]:
    """Runs one step; returns {id: (start, tokens, samples)}."""
    batch = worker.next_batch()
    worker.check_integrity()
    if batch is None:
        return {}
    worker.commit(batch, stopped)
    worker.check_integrity()
    return {item.request_id: (item.start, item.num_tokens, item.samples) for item in batch.items}
