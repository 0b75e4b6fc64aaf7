"""The predicted queue delay beside the wait that follows: the same Router's table, replicas of the simulator."""

from __future__ import annotations

import numpy as np
import pytest

from core.load_snapshot import LoadSnapshot
from policies.compose import build_scheduler
from policies.fleet.events import GlobalEvent, GlobalInstruction
from policies.fleet.queue_delay import queue_delay_s
from policies.fleet.scheduler import GlobalScheduler
from policies.placement.base import LeastWork
from policies.replica.events import RequestsArrived
from policies.replica.scheduler import SchedulerLimits
from policies.settings import PolicySettings
from simulator import predictors
from simulator.cluster.fleet import Fleet, FleetShape
from simulator.cluster.latency import A100_7B
from simulator.cluster.replica import ReplicaShape
from simulator.traffic.workloads import build_workload

SHAPE = ReplicaShape(num_blocks=120_000 // 16, block_size=16, max_num_seqs=64, max_batch_tokens=2048)


class Foretelling(GlobalScheduler):
    """Notes, before a request is placed, how long it is to wait; and after each event, how long one would wait."""

    def __init__(self, num_replicas: int) -> None:
        super().__init__(LeastWork())
        self._num_replicas = num_replicas
        self.foretold_s: dict[str, float] = {}
        self.seen: list[tuple[float, float]] = []

    def handle(self, event: GlobalEvent, now: float) -> list[GlobalInstruction]:
        if isinstance(event, RequestsArrived):
            delay_s = self.delay_s()
            self.foretold_s |= dict.fromkeys((request.request_id for request in event.requests), delay_s)
        instructions = super().handle(event, now)
        self.seen.append((now, self.delay_s()))
        return instructions

    def delay_s(self) -> float:
        kv_tokens = SHAPE.num_blocks * SHAPE.block_size
        fleet = (self._num_replicas, SHAPE.max_num_seqs, kv_tokens, True, A100_7B.cost)
        found = queue_delay_s(LoadSnapshot(self.demand(), *fleet), self._num_replicas)
        assert found is not None
        return found


def foretold_and_waited(rate: float, num_replicas: int) -> tuple[np.ndarray, np.ndarray]:
    """400 requests a replica in order of arrival, predicted exactly; a wait ends where the prompt begins."""
    drawn = build_workload("sharegpt-like", np.random.default_rng(1), 400 * num_replicas, rate * num_replicas, None)
    router = Foretelling(num_replicas)
    limits = SchedulerLimits(SHAPE.max_num_seqs, 0)
    fleet = Fleet(
        FleetShape(SHAPE, A100_7B, num_replicas), router, lambda _: build_scheduler("fcfs", limits, PolicySettings())
    )
    done = fleet.run(predictors.oracle(drawn)).done
    waited_s = [record.ttft_s - A100_7B.cost.prefill_s(record.arrival.prompt_len) for record in done]
    return np.array([router.foretold_s[record.arrival.request_id] for record in done]), np.array(waited_s)


@pytest.mark.parametrize("num_replicas", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_in_an_overload_the_prediction_follows_the_wait(num_replicas: int) -> None:
    foretold_s, waited_s = foretold_and_waited(20.0, num_replicas)
    assert waited_s.mean() > 3.0
    assert 0.9 < foretold_s.mean() / waited_s.mean() < 1.5
    assert np.corrcoef(foretold_s, waited_s)[0, 1] > 0.95


def test_where_nobody_waits_nothing_is_predicted() -> None:
    foretold_s, waited_s = foretold_and_waited(4.0, 1)
    assert waited_s.mean() < 0.05
    assert foretold_s.mean() < 0.05


@pytest.mark.parametrize("num_replicas", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_retry_after_is_when_it_would_be_admitted_if_no_others_came(num_replicas: int) -> None:
    """A backlog of each size is rolled forward until the delay has fallen to the limit; the median error is small."""
    limit_s = 2.0
    drawn = build_workload("sharegpt-like", np.random.default_rng(3), 900 * num_replicas, 400.0 * num_replicas, None)
    router = Foretelling(num_replicas)
    limits = SchedulerLimits(SHAPE.max_num_seqs, 0)
    fleet = Fleet(
        FleetShape(SHAPE, A100_7B, num_replicas), router, lambda _: build_scheduler("fcfs", limits, PolicySettings())
    )
    fleet.run(predictors.oracle(drawn))
    last_arrival = max(arrival.arrived_at for arrival in drawn)
    after = [(now, delay_s) for now, delay_s in router.seen if now > last_arrival]
    admitted_at = next(now for now, delay_s in after if delay_s <= limit_s)
    errors = [
        abs(delay_s - limit_s - (admitted_at - now)) / (admitted_at - now)
        for now, delay_s in after
        if admitted_at - now > 1.0
    ]
    assert len(errors) > 50
    assert np.median(errors) <= 0.25
