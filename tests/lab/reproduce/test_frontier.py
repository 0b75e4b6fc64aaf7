"""The bounds of a hindsight schedule: no policy beats them, and they are sharp where the answer is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.costs import StepCost
from farsight.core.errors import InvalidValueError
from farsight.policies.compose import build_router, build_scheduler
from farsight.policies.replica.scheduler import SchedulerLimits
from farsight.policies.settings import PolicySettings
from farsight.simulator import predictors
from farsight.simulator.cluster.fleet import Fleet, FleetShape
from farsight.simulator.cluster.latency import LinearLatency
from farsight.simulator.cluster.replica import ReplicaShape
from farsight.simulator.traffic.workload import SimRequest
from lab.reproduce.frontier import MeanBound, ReplicaBounds, shares, tail_bound, workload

COST = StepCost(base_s=0.010, prefill_token_s=0.1e-3, decode_seq_s=0.1e-3, context_token_s=1e-6)
BOUNDS = ReplicaBounds(COST, max_num_seqs=8, kv_tokens=2400, max_batch_tokens=128)
SLOTS, MEMORY = (1.0, 0.0, 0.0), (0.0, 1.0, 0.0)


def crowd(seed: int, num: int = 150) -> list[SimRequest]:
    rng = np.random.default_rng(seed)
    at = np.cumsum(rng.exponential(0.04, num))
    return [
        SimRequest(str(i), float(at[i]), int(rng.integers(20, 300)), int(rng.zipf(1.5) % 90) + 2, 100)
        for i in range(num)
    ]


def completion_s(requests: list[SimRequest], order: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    shape = ReplicaShape(150, 16, 300, BOUNDS.max_num_seqs, BOUNDS.max_batch_tokens, look_every=1)
    settings = PolicySettings(SchedulerConfig(tail=0.5, max_gap_ms=0.0), cost=COST)
    limits = SchedulerLimits(BOUNDS.max_num_seqs, 0)
    fleet = Fleet(
        FleetShape(shape, LinearLatency(COST)),
        build_router("farsight"),
        lambda _: build_scheduler("past-future" if order == "fcfs" else "farsight", limits, settings, order=order),
    )
    return np.array([record.jct_s for record in fleet.run(predictors.oracle(requests)).done])


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 8))])
def test_no_policy_beats_the_bounds(seed: int) -> None:
    requests = crowd(seed, 150 if seed else 50)
    tail_s = max(tail_bound(workload(requests, BOUNDS, each), 0.95) for each in shares())
    for order in ("fcfs", "gittins", "boosted"):
        took_s = completion_s(requests, order)
        assert np.quantile(took_s, 0.95, method="higher") >= tail_s
        within_s = float(np.quantile(took_s, 0.95, method="higher"))
        for weights in (SLOTS, MEMORY, (0.0, 0.5, 0.5)):
            load = workload(requests, BOUNDS, weights)
            for limit_s in (math.inf, within_s):
                bound = MeanBound(load, 60.0, 200, limit_s, 0.95).solve(float(took_s.mean()), 30)
                assert 0 < bound <= took_s.mean()


def test_a_request_alone_takes_its_bound() -> None:
    request = SimRequest("a", 0.0, 100, 60, 100)
    (took_s,) = completion_s([request], "fcfs")
    load = workload([request], BOUNDS, SLOTS)
    assert tail_bound(load, 1.0) == pytest.approx(took_s)
    bound = MeanBound(load, 2.0, 2000).solve(took_s, 5)
    assert 0.9 * took_s < bound <= took_s


def test_the_bound_of_a_queue_of_equal_requests_is_their_work() -> None:
    """100 requests at once, eight at a time: the last ends when all work is done, and the mean is half of that."""
    requests = [SimRequest(str(i), 0.0, 1, 81, 100) for i in range(100)]
    load = workload(requests, BOUNDS, SLOTS)
    total_s = float(load.work_s.sum())
    assert tail_bound(load, 1.0) == pytest.approx(total_s)
    assert MeanBound(load, 2 * total_s, 400).solve(total_s, 60) == pytest.approx(total_s / 2, rel=0.1)
    assert completion_s(requests, "fcfs").max() == pytest.approx(total_s, rel=0.1)


def test_a_shorter_tail_costs_mean() -> None:
    requests = crowd(0)
    load = workload(requests, BOUNDS, SLOTS)
    short_s = 1.05 * tail_bound(load, 0.99)
    free, held = (MeanBound(load, 60.0, 200, within, 0.99).solve(3.0, 60) for within in (math.inf, short_s))
    assert held >= free * 0.999
    assert all(sum(each) == pytest.approx(1.0) for each in shares())
    with pytest.raises(InvalidValueError, match="shares"):
        workload(requests, BOUNDS, (0.5, 0.6, 0.0))
