"""Steps taken at once are the steps taken one by one."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable
from typing import Any

import pytest

from farsight.core.messages.plans import FinishedSequence, Plan, Slot, StepReport
from farsight.core.request import Request, SamplingParams
from farsight.kvcache import BatchLimits, BlockManager, LeaseExecutor, StaticExecutor, StepBatch
from tests.volumes import at_volume


def executor(num_blocks: int, block_size: int, max_num_seqs: int) -> LeaseExecutor:
    return LeaseExecutor(BlockManager(num_blocks, block_size), BatchLimits(max_num_seqs, 8), "w")


def random_plan(rng: random.Random) -> Plan:
    slots = []
    for i in range(rng.randint(1, 8)):
        request = Request(f"r{i}", 0, "i", (1,) * rng.randint(1, 12), SamplingParams(rng.randint(1, 30)))
        total = request.max_total_len
        granted = rng.choice([total, total, request.prompt_len + rng.randint(1, 10)])
        slots.append(Slot(f"r{i}", 0, rng.choice([total, granted]), granted, rng.random() < 0.3, 0, request))
    return Plan("w", 0, 1, 0, rng.randint(0, 3), tuple(slots))


def chosen(batch: StepBatch | None) -> list[tuple[str, int, int, bool]]:
    items = () if batch is None else batch.items
    return [(item.request_id, item.start, item.num_tokens, item.samples) for item in items]


def ended(ends: Iterable[FinishedSequence]) -> list[FinishedSequence]:
    """Ends without what each sequence cost."""
    return [dataclasses.replace(each, gpu_s=0.0) for each in ends]


def costs(ends: Iterable[FinishedSequence]) -> Any:
    """What each sequence cost: a jump divides its time by the prices of its middle, which is nearly the same."""
    return pytest.approx([each.gpu_s for each in ends], rel=0.1)


def state(report: StepReport) -> tuple[StepReport, dict[str, Any]]:
    """What a report says; sums of service to rounding, since one jump adds up fewer numbers than single steps."""
    services = {each.tenant: pytest.approx(each.gpu_s, rel=1e-9) for each in report.services}
    return dataclasses.replace(report, report_seq=0, services=(), finished=tuple(ended(report.finished))), services


def live(seed: int) -> int:
    """One life of two executors; returns how many steps were taken at once."""
    rng = random.Random(seed)
    sizes = rng.randint(8, 30), rng.choice([1, 4]), rng.randint(1, 6)
    fast, slow = executor(*sizes), executor(*sizes)
    plan = random_plan(rng)
    for each in (fast, slow):
        each.apply_plan(plan)
    jumps = 0
    while (batch := fast.next_batch()) is not None:
        steps = fast.horizon(batch, 1 << 30)
        most = 1 + (seed + jumps) % 40
        assert min(most, fast.horizon(batch, most)) == min(most, steps), "a bound changes nothing below it"
        steps = rng.choice([steps, rng.randint(1, steps)])
        jumps += steps - 1
        ends = fast.commit(batch, duration_s=0.5 * steps, num_steps=steps)
        slow_ends = []
        for i in range(steps):
            single = slow.next_batch()
            assert single is not None
            expected = [(rid, start + i * (n == 1), n, s) for rid, start, n, s in chosen(batch)]
            assert chosen(single) == expected
            slow_ends += slow.commit(single, duration_s=0.5)
        assert ended(ends) == ended(slow_ends)
        assert [each.gpu_s for each in ends] == costs(slow_ends)
        fast.check_integrity()
        fast.short_blocks = slow.short_blocks  # of steps not looked at
        assert state(fast.report()) == state(slow.report())
    assert slow.next_batch() is None
    return jumps


@at_volume(100, 1000)
def test_a_jump_is_so_many_single_steps(volume: int) -> None:
    assert sum(live(seed) for seed in range(volume)) > 10 * volume


def padded_life(seed: int) -> int:
    """As ``live`` for padded batches: outputs stop, or reach their limits, in the midst of a jump."""
    rng = random.Random(seed)
    num_blocks, block_size, max_num_seqs = rng.randint(8, 60), rng.choice([1, 4]), rng.randint(1, 6)
    limits = BatchLimits(max_num_seqs, 8)
    fast, slow = (StaticExecutor(BlockManager(num_blocks, block_size), limits, "w", 64) for _ in range(2))
    plan = random_plan(rng)
    for each in (fast, slow):
        each.apply_plan(plan)
    requests = {slot.request_id: slot.request for slot in plan.slots if slot.request}
    limits_at = {name: request.sampling.max_new_tokens for name, request in requests.items()}
    stops_at = {name: rng.randint(1, limit) for name, limit in limits_at.items() if rng.random() < 0.5}
    jumps = 0
    while (batch := fast.next_batch()) is not None:
        had = {
            item.request_id: item.start + item.num_tokens - requests[item.request_id].prompt_len for item in batch.items
        }
        left = {
            item.request_id: stops_at.get(item.request_id, 1000) - had[item.request_id]
            for item in batch.items
            if item.samples
        }
        last = max((min(limits_at[name], stops_at.get(name, 1000)) - num for name, num in had.items()), default=1)
        steps = min(fast.horizon(batch, 1 << 30), last)
        steps = rng.choice([steps, rng.randint(1, steps)])
        jumps += steps - 1
        after = {request_id: num for request_id, num in left.items() if num <= steps}
        ends = fast.commit(batch, duration_s=0.5 * steps, num_steps=steps, stopped_after=after)
        slow_ends = []
        for i in range(1, steps + 1):
            single = slow.next_batch()
            assert single is not None
            slow_ends += slow.commit(single, [rid for rid, num in after.items() if num == i], duration_s=0.5)
        assert ended(ends) == ended(slow_ends)
        assert [each.gpu_s for each in ends] == costs(slow_ends)
        fast.check_integrity()
        assert state(fast.report()) == state(slow.report())
    assert slow.next_batch() is None
    assert state(fast.report()) == state(slow.report()), "both lack as many blocks"
    return jumps


@at_volume(100, 1000)
def test_a_jump_of_a_padded_batch_is_so_many_single_steps(volume: int) -> None:
    assert sum(padded_life(seed) for seed in range(volume)) > 3 * volume
