"""``Retry-After`` under a limit of waiting: the state at a refusal is rolled forward without further arrivals.

The ingress replica's own check decides, in front of the Router's table and replicas of the simulator. A refusal is
judged by a second run that is the same up to it, and in which no request comes afterwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from farsight.core.config.server import ServerConfig
from farsight.core.messages.requests import AnnounceReply, LoadSnapshot
from farsight.policies.compose import build_scheduler
from farsight.policies.fleet.events import GlobalEvent, GlobalInstruction, RequestsEnded, RequestsStarted
from farsight.policies.fleet.queue_delay import queue_delay_s
from farsight.policies.fleet.scheduler import GlobalScheduler
from farsight.policies.placement.base import LeastWork
from farsight.policies.replica.events import RefuseRequest, RequestsArrived
from farsight.policies.replica.scheduler import SchedulerLimits
from farsight.policies.settings import PolicySettings
from farsight.services.ingress.first_check import CountedRequest, FirstCheck, TooMuch
from farsight.simulator import predictors
from farsight.simulator.cluster.fleet import Fleet, FleetShape
from farsight.simulator.cluster.latency import A100_7B
from farsight.simulator.cluster.replica import ReplicaShape
from farsight.simulator.traffic.workload import SimRequest
from farsight.simulator.traffic.workloads import build_workload

SHAPE = ReplicaShape(num_blocks=120_000 // 16, block_size=16, max_num_seqs=32, max_batch_tokens=2048)
ANNOUNCE_S = 0.5
LIMIT_S = 2.0


class _Admitted(Exception):
    """A request would be admitted now."""


class Guarded(GlobalScheduler):
    """A Router behind the check of one ingress replica, which hears its load every half second.

    Args:
        last: After this arrival none comes: the run ends at the instant at which one would be admitted.

    Attributes:
        refusals: Index of each refused arrival, its instant, and the seconds after which it was told to come back.
    """

    def __init__(self, num_replicas: int, last: int | None = None) -> None:
        super().__init__(LeastWork())
        self.check = FirstCheck(ServerConfig(max_wait_s=LIMIT_S, max_queued_requests=10**6, max_queued_tokens=10**9))
        self.refusals: list[tuple[int, float, float]] = []
        self._fleet = (num_replicas, SHAPE.max_num_seqs, SHAPE.num_blocks * SHAPE.block_size, True, A100_7B.cost)
        self._last = last
        self._num_arrived = 0
        self._heard_at = -ANNOUNCE_S
        self._open: dict[str, CountedRequest] = {}
        self._seen: dict[str, float] = {}
        self.running: Fleet | None = None

    def handle(self, event: GlobalEvent, now: float) -> list[GlobalInstruction]:
        match event:
            case RequestsArrived(requests):
                out: list[GlobalInstruction] = []
                for request in requests:
                    out += self._arrive(event, request.request_id, now)
                return out
            case RequestsStarted(started):
                for each in started:
                    self.check.waited(self._open[each.request_id], each.queue_s)
                    self._seen[each.request_id] = now
            case RequestsEnded(finished):
                for sequence in finished:
                    self.check.leave(self._open.pop(sequence.request_id))
        out = super().handle(event, now)
        self._hear(now)
        if self._last is not None and self._num_arrived > self._last and self.check.refusal() is None:
            raise _Admitted(now)
        return out

    def _arrive(self, event: RequestsArrived, request_id: str, now: float) -> list[GlobalInstruction]:
        request = next(each for each in event.requests if each.request_id == request_id)
        index, self._num_arrived = self._num_arrived, self._num_arrived + 1
        self._count_tokens(now)
        try:
            admitted = self.check.admit(request)
        except TooMuch as error:
            self.refusals.append((index, now, error.retry_after_s))
            return [RefuseRequest(request.request_id, 0, "", str(error))]
        assert request.forecast is not None
        admitted.output_len = request.forecast.mean  # as of a request that ignores the end of sequence
        self.check.placed(admitted)
        self._open[request_id] = admitted
        return super().handle(RequestsArrived((request,)), now)

    def _hear(self, now: float) -> None:
        if now - self._heard_at >= ANNOUNCE_S:
            self._heard_at = now
            self.check.announcing()
            self.check.heard(AnnounceReply((), (), (), (), outlook=LoadSnapshot(self.demand(), *self._fleet)))

    def _count_tokens(self, now: float) -> None:
        """Tokens pass the ingress replica as they come."""
        assert self.running is not None
        for replica in self.running.replicas:
            for request_id, num_tokens in replica.tokens_at(now).items():
                admitted, at = self._open[request_id], self._seen.get(request_id)
                if at is not None and num_tokens > admitted.num_tokens:
                    self.check.progressed(admitted, num_tokens - admitted.num_tokens, now - at)
                    self._seen[request_id] = now


def fleet_of(router: GlobalScheduler, num_replicas: int, shape: ReplicaShape) -> Fleet:
    limits = SchedulerLimits(shape.max_num_seqs, 0)
    whole = FleetShape(shape, A100_7B, num_replicas)
    return Fleet(whole, router, lambda _: build_scheduler("fcfs", limits, PolicySettings()))


def run(arrivals: Sequence[SimRequest], num_replicas: int, last: int | None = None) -> Guarded:
    router = Guarded(num_replicas, last)
    router.running = fleet_of(router, num_replicas, SHAPE)
    router.running.run(arrivals)
    return router


def admitted_at(arrivals: Sequence[SimRequest], num_replicas: int, index: int) -> float:
    """When a request would be admitted if none came after this arrival."""
    with pytest.raises(_Admitted) as found:
        run(arrivals[: index + 1], num_replicas, index)
    return float(found.value.args[0])


def errors(predictor: Callable[[Sequence[SimRequest]], list[SimRequest]], num_replicas: int) -> np.ndarray:
    """Relative errors of eight refusals at about three times the capacity."""
    drawn = build_workload("sharegpt-like", np.random.default_rng(1), 300 * num_replicas, 12.0 * num_replicas, None)
    arrivals = list(predictor(drawn))
    refusals = run(arrivals, num_replicas).refusals
    assert len(refusals) > len(arrivals) / 3
    found = []
    steady = refusals[len(refusals) // 4 :]
    for index, now, retry_after_s in steady[:: len(steady) // 8]:
        real_s = admitted_at(arrivals, num_replicas, index) - now
        found.append((retry_after_s - real_s) / real_s)
    return np.array(found)


@pytest.mark.parametrize(("num_replicas", "most"), [(1, 0.25), pytest.param(2, 0.3, marks=pytest.mark.nightly)])
def test_retry_after_is_right_where_lengths_are_known(num_replicas: int, most: float) -> None:
    """Two replicas end up with queues that differ, and the check knows their sum."""
    found = np.abs(errors(predictors.oracle, num_replicas))
    assert np.median(found) <= most


WIDE = dataclasses.replace(SHAPE, max_num_seqs=64)


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
        kv_tokens = WIDE.num_blocks * WIDE.block_size
        fleet = (self._num_replicas, WIDE.max_num_seqs, kv_tokens, True, A100_7B.cost)
        found = queue_delay_s(LoadSnapshot(self.demand(), *fleet), self._num_replicas)
        assert found is not None
        return found


def foretold_and_waited(rate: float, num_replicas: int, num: int) -> tuple[np.ndarray, np.ndarray]:
    """So many requests a replica in order of arrival, predicted exactly; a wait ends where the prompt begins."""
    drawn = build_workload("sharegpt-like", np.random.default_rng(1), num * num_replicas, rate * num_replicas, None)
    router = Foretelling(num_replicas)
    done = fleet_of(router, num_replicas, WIDE).run(predictors.oracle(drawn)).done
    waited_s = [record.ttft_s - A100_7B.cost.prefill_s(record.arrival.prompt_len) for record in done]
    return np.array([router.foretold_s[record.arrival.request_id] for record in done]), np.array(waited_s)


@pytest.mark.parametrize("num_replicas", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_in_an_overload_the_prediction_follows_the_wait(num_replicas: int) -> None:
    foretold_s, waited_s = foretold_and_waited(20.0, num_replicas, 300)
    assert waited_s.mean() > 3.0
    assert 0.9 < foretold_s.mean() / waited_s.mean() < 1.5
    assert np.corrcoef(foretold_s, waited_s)[0, 1] > 0.95


def test_where_nobody_waits_nothing_is_predicted() -> None:
    foretold_s, waited_s = foretold_and_waited(4.0, 1, 150)
    assert waited_s.mean() < 0.05
    assert foretold_s.mean() < 0.05


@pytest.mark.parametrize("num_replicas", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_retry_after_is_when_it_would_be_admitted_if_no_others_came(num_replicas: int) -> None:
    """A backlog of each size is rolled forward until the delay has fallen to the limit; the median error is small."""
    drawn = build_workload("sharegpt-like", np.random.default_rng(3), 600 * num_replicas, 400.0 * num_replicas, None)
    router = Foretelling(num_replicas)
    fleet_of(router, num_replicas, WIDE).run(predictors.oracle(drawn))
    last_arrival = max(arrival.arrived_at for arrival in drawn)
    after = [(now, delay_s) for now, delay_s in router.seen if now > last_arrival]
    admitted_at = next(now for now, delay_s in after if delay_s <= LIMIT_S)
    errors = [
        abs(delay_s - LIMIT_S - (admitted_at - now)) / (admitted_at - now)
        for now, delay_s in after
        if admitted_at - now > 1.0
    ]
    assert len(errors) > 50
    assert np.median(errors) <= 0.25
