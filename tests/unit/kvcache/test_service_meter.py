"""What rows are charged for: GPU-seconds that add up to the worker's busy time, told until they are known."""

from __future__ import annotations

import random

import numpy as np
import pytest

from farsight.core.costs import A100_7B, StepCost, row_shares
from farsight.core.messages.plans import Plan, Slot
from farsight.core.request import Request, SamplingParams
from farsight.kvcache import BatchLimits, BlockManager, LeaseExecutor
from farsight.policies.order.gittins import DecodePrice

NUM_SEQS, CAPACITY = 8, 4000


def test_shares_are_those_of_the_price_that_the_order_ranks_by() -> None:
    rng = random.Random(1)
    contexts = [rng.randrange(1, CAPACITY) for _ in range(NUM_SEQS)]
    price = DecodePrice(A100_7B, NUM_SEQS, CAPACITY)
    prices = [price.seconds(np.array([float(context)]), np.array([1.0]))[0] for context in contexts]
    shares = row_shares(A100_7B, [(context - 1, 1) for context in contexts], NUM_SEQS, CAPACITY)
    assert shares == pytest.approx(np.array(prices) / sum(prices))
    shares = row_shares(A100_7B, [(0, 512), (300, 1), (3000, 1)], NUM_SEQS, CAPACITY)
    assert sum(shares) == pytest.approx(1.0)
    assert shares[0] > shares[2] > shares[1], "long prompts pay"
    assert row_shares(StepCost(0.0, 0.0, 0.0, 0.0), [(0, 1), (0, 1)], 8, 100) == [0.5, 0.5]
    assert row_shares(A100_7B, [], 8, 100) == []


def request(name: str, tenant: str, prompt: int = 6, out: int = 20) -> Request:
    return Request(name, 0, "i", (1,) * prompt, SamplingParams(out), tenant=tenant)


def plan(executor: LeaseExecutor, seq: int, *requests: Request) -> None:
    slots = tuple(Slot(each.request_id, 0, 100, 100, False, 0, each) for each in requests)
    executor.apply_plan(Plan("w", executor.lease, seq, 0, 0, slots))


def step(executor: LeaseExecutor) -> None:
    batch = executor.next_batch()
    assert batch is not None
    executor.commit(batch, duration_s=0.5)
    executor.check_integrity()


def test_tenants_are_charged_for_all_steps_those_of_cancelled_requests_too() -> None:
    executor = LeaseExecutor(BlockManager(200, 4), BatchLimits(NUM_SEQS, 64), "w")
    plan(executor, 1, request("a", "acme"), request("b", "bolt", 30), request("c", "bolt", 30))
    for _ in range(3):
        step(executor)
    plan(executor, 2, request("a", "acme"))  # both of the other tenant's are cancelled
    step(executor)
    first = {each.tenant: each.gpu_s for each in executor.report().services}
    assert sum(first.values()) == pytest.approx(4 * 0.5)
    assert first["bolt"] > first["acme"] - 0.5 > 0
    assert executor.sequences["a"].gpu_s == pytest.approx(first["acme"])


def test_sums_are_told_until_acknowledged_and_to_each_new_scheduler() -> None:
    executor = LeaseExecutor(BlockManager(200, 4), BatchLimits(NUM_SEQS, 64), "w")
    plan(executor, 1, request("a", "acme"))
    step(executor)
    report = executor.report()
    assert report.services == executor.report().services != ()
    executor.acknowledge(report.report_seq)
    assert executor.report().services == ()
    step(executor)
    executor.acknowledge(executor.report().report_seq - 1)
    assert [each.gpu_s for each in executor.report().services] == [1.0]
    executor.take_over()
    assert [each.gpu_s for each in executor.report().services] == [1.0]
