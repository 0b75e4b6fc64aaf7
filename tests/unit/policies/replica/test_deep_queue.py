"""What a report costs a scheduler does not grow with the queue behind it: counted in bytecodes, under every preset."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace
from functools import partial

import pytest

from benchmarks.decisions.deep_queue import arrivals
from farsight.core.config.scheduling import BatchConfig, SchedulerConfig
from farsight.core.messages.plans import FinishedSequence, WorkerReady
from farsight.core.request import Request, SequenceStatus
from farsight.policies.compose import build_batch_scheduler, build_scheduler, is_batch_mode
from farsight.policies.fleet.events import GlobalEvent, PlaceRequests, ReplicaUp, RequestsEnded
from farsight.policies.order import gittins
from farsight.policies.presets import PRESETS
from farsight.policies.replica.events import CostLearned, Event, Instruction, RequestsArrived, WorkerReported
from farsight.policies.replica.scheduler import SchedulerLimits
from farsight.policies.settings import BatchSettings, PolicySettings
from farsight.simulator.cluster.latency import A100_7B
from farsight.simulator.cluster.records import Record, Recorder
from farsight.simulator.cluster.replica import Replica, ReplicaShape
from farsight.simulator.traffic.workload import SimRequest, as_request
from tests.opcodes import num_opcodes

FEW, MANY, MOST = 1_000, 6_000, 10_000
NUM_REPORTS = 4
SLICE = 24_000
"""Bytecodes that may go, at any report, to a bounded part of what concerns all who wait. A look at each of the 5,000
that are more here would take more."""

BLOCK_SIZE = 16

CONTINUOUS = {(row.order, row.admission, row.kv): name for name, row in PRESETS.items() if not is_batch_mode(name)}
BATCH = {row.order: name for name, row in PRESETS.items() if is_batch_mode(name)}


@functools.cache
def prefixed_requests() -> list[tuple[Request, SimRequest]]:
    """``MANY`` requests, the same for every preset; they all begin alike, so the first block concerns all of them."""
    requests, num_own = [], 0
    for arrival in itertools.islice(arrivals(0, prefixes=True), MANY):
        prefix = (7, 8, 9, *arrival.prefix)
        prompt_len = arrival.prompt_len + 3 * BLOCK_SIZE
        num = prompt_len // BLOCK_SIZE - len(prefix)
        num_own += num
        changed = replace(arrival, prompt_len=prompt_len, output_len=min(arrival.output_len, 30))
        requests.append((as_request(changed, prefix + tuple(range(-num_own, num - num_own))), changed))
    return requests


@functools.cache
def plain_requests() -> list[Request]:
    """``MOST`` requests without prefixes."""
    return [replace(as_request(each), ingress_id="i") for each in itertools.islice(arrivals(0), MOST)]


def most_of_a_report(preset: str, num_waiting: int, order: str = "") -> int:
    """The most bytecodes of a report, and of news of prices, with so many waiting."""
    settings = PolicySettings(SchedulerConfig(gamma=0.1, max_gap_ms=0.0), cost=A100_7B.cost)
    scheduler = build_scheduler(preset, SchedulerLimits(16, 4), settings, order=order)
    shape = ReplicaShape(400, BLOCK_SIZE, 800, 16, 512, look_every=1, shares_prefixes=True)
    replica = Replica("0", scheduler, shape, A100_7B, Recorder(), lambda *_: None, lambda *_: None)
    replica.executor.tell_cache()
    requests = [(request, Record(changed)) for request, changed in prefixed_requests()[:num_waiting]]
    replica.submit(requests, 0.0)
    counts: list[int] = []
    handle = scheduler.handle

    def counted(event: Event, now: float) -> list[Instruction]:
        if not isinstance(event, WorkerReported | CostLearned):
            return handle(event, now)
        out: list[Instruction] = []
        counts.append(num_opcodes(lambda: out.extend(handle(event, now))))
        return out

    scheduler.handle = counted  # type: ignore[method-assign]
    while len(counts) < NUM_REPORTS:
        replica.wake(replica.wakes_at)
    scheduler.handle = handle  # type: ignore[method-assign]
    for _ in range(40):  # until outputs have ended and, for most orders, a request has given way
        replica.wake(replica.wakes_at)
    scheduler.handle = counted  # type: ignore[method-assign]
    cost = A100_7B.cost
    counted(CostLearned(replace(cost, base_s=2 * cost.base_s)), replica.wakes_at)
    for _ in range(50):  # the history is read again
        job = next(iter(scheduler.selector.running), None)
        if job is not None:
            scheduler.order.learn(job, censored=False)
    while len(counts) < 2 * NUM_REPORTS:
        replica.wake(replica.wakes_at)
    scheduler.check_integrity()
    return max(counts)


def test_ranks_are_worked_out_only_while_a_request_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three run in four places; then two come, of which one has to wait, until an output ends."""
    num_ranked = 0
    rank = gittins.gittins_rank

    def counted(costs: gittins.FloatArray, weights: gittins.FloatArray) -> gittins.FloatArray:
        nonlocal num_ranked
        num_ranked += len(costs)
        return rank(costs, weights)

    monkeypatch.setattr(gittins, "gittins_rank", counted)
    scheduler = build_scheduler(
        "farsight", SchedulerLimits(4, 2), PolicySettings(SchedulerConfig(max_gap_ms=0.0), cost=A100_7B.cost)
    )
    ended: list[str] = []
    shape = ReplicaShape(4000, BLOCK_SIZE, 0, 4, 512, look_every=1)
    replica = Replica(
        "0", scheduler, shape, A100_7B, Recorder(), lambda *_: None, lambda _, end: ended.append(end.request_id)
    )

    def come(first: int, end: int, now: float) -> None:
        chosen = [SimRequest(f"r{number}", now, 100, 40, 200) for number in range(first, end)]
        replica.submit([(as_request(each), Record(each)) for each in chosen], now)

    def ranked_in(num_steps: int) -> int:
        before = num_ranked
        for _ in range(num_steps):
            replica.wake(replica.wakes_at)
        return num_ranked - before

    come(0, 3, 0.0)
    ranked_in(5)
    assert len(scheduler.selector.running) == 3
    assert ranked_in(20) == 0
    come(3, 5, replica.wakes_at)
    assert len(scheduler.selector.running) == 4
    assert ranked_in(5) > 0
    while len(ended) < 5:
        replica.wake(replica.wakes_at)
    scheduler.check_integrity()


@pytest.mark.parametrize("preset", CONTINUOUS.values())
def test_a_report_costs_the_same_however_many_wait(preset: str) -> None:
    few, many = most_of_a_report(preset, FEW), most_of_a_report(preset, MANY)
    assert many <= 1.2 * few + SLICE


def test_the_order_by_response_ratio_as_well() -> None:
    few, many = most_of_a_report("fcfs", FEW, "hrrn"), most_of_a_report("fcfs", MANY, "hrrn")
    assert many <= 1.2 * few + SLICE


STORY = 3_000
"""Bytecodes of what an explanation tells of a batch, however many requests wait."""


def most_of_an_end(preset: str, num_waiting: int, batch_size: int) -> int:
    """The most bytecodes of an event that lets a replica pull."""
    config = BatchConfig(num_bins=6, max_wait_s=math.inf)
    settings = BatchSettings(20_000, lambda size, prompt, output: size * prompt * 1e-5 + output * 0.02, config)
    scheduler = build_batch_scheduler(preset, replace(settings, max_num_seqs=batch_size))
    running: list[PlaceRequests] = []

    def handle(event: GlobalEvent, now: float) -> None:
        running.extend(each for each in scheduler.handle(event, now) if isinstance(each, PlaceRequests))

    up = [ReplicaUp(name, WorkerReady(name, 2000, BLOCK_SIZE, 4096, True, 0, 0)) for name in "ab"]
    for event in up:
        handle(event, 0.0)
    handle(RequestsArrived(tuple(plain_requests()[:num_waiting])), 1.0)
    counts = []
    for now in range(2, 2 + NUM_REPORTS):
        batch = running.pop(0)
        ends = [FinishedSequence(each.request_id, 0, SequenceStatus.FINISHED_STOPPED, 9) for each in batch.requests]
        events: tuple[RequestsEnded | ReplicaUp, ...] = RequestsEnded(tuple(ends)), up[0]
        for told in events:
            counts += [num_opcodes(partial(handle, told, float(now)))]
    scheduler.check_integrity()
    return max(counts)


@pytest.mark.parametrize("preset", [name for order, name in BATCH.items() if order != "wma-hrrn"])
def test_the_next_batch_is_found_without_looking_at_all_who_wait(preset: str) -> None:
    """In batches so small that ``FEW`` fill them too: an end costs some 600 bytecodes for each request of a batch."""
    few, many = most_of_an_end(preset, FEW, 8), most_of_an_end(preset, MANY, 8)
    assert many <= 1.2 * few + 10_000


@pytest.mark.parametrize("preset", [BATCH["wma-hrrn"]])
def test_response_ratios_are_of_batches_not_of_requests(preset: str) -> None:
    # The tenant of each of the 32 requests that end is charged: 160 bytecodes. The sums and the demand of its replica
    # and its ingress replica lose it, and get one that begins: 240. Its record is taken off the replica, and the next
    # one is put there: 120. The batch's story is told once.
    assert most_of_an_end(preset, MOST, 32) <= 60 * (MOST // 10) + (160 + 240 + 120) * 32 + STORY
