"""The cost of one report for a scheduler with 10,000 waiting requests, under every preset.

A replica runs a full batch step by step; after each step its worker reports, and a new request comes for each that has
ended, so the queue keeps its length. In batch mode the events are the ends of batches and the pulls that follow them.
CPU time of the thread. ``python -m benchmarks.decisions deep_queue``.
"""

from __future__ import annotations

import gc
import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from benchmarks.decisions.row import Row
from farsight.core.config.scheduling import BatchConfig
from farsight.core.costs import StepCost
from farsight.core.forecast import Forecast
from farsight.core.messages.plans import FinishedSequence, WorkerReady
from farsight.core.request import Request, SequenceStatus
from farsight.policies.compose import build_batch_scheduler, build_scheduler, is_batch_mode
from farsight.policies.fleet.events import GlobalEvent, PlaceRequests, ReplicaUp, RequestsEnded
from farsight.policies.presets import PRESETS
from farsight.policies.replica.events import Event, Instruction, RequestsArrived, WorkerReported
from farsight.policies.replica.scheduler import ReplicaScheduler, SchedulerLimits
from farsight.policies.settings import BatchSettings, PolicySettings
from farsight.simulator.cluster.latency import A100_7B
from farsight.simulator.cluster.records import Record, Recorder
from farsight.simulator.cluster.replica import Replica, ReplicaShape
from farsight.simulator.traffic.workload import SimRequest, as_request

NUM_WAITING = 10_000
TARGET_MS = 2.0
BLOCK_SIZE = 16
MAX_NUM_SEQS = 128
NUM_BLOCKS = 7_600
"""121,600 tokens of KV: a 7B model on a device of 80 GB."""

NUM_HOST_BLOCKS = 15_200
SHARED_BLOCKS = 40
NUM_FAMILIES = 64
"""Prompts with equal beginnings, for the presets that use prefixes."""


def rows(presets: tuple[str, ...] = tuple(PRESETS), num_reports: int = 3000) -> list[Row]:
    """Mean, 99th percentile and maximum of each preset."""
    return [row for preset in presets for row in _rows_of(preset, num_reports)]


def _rows_of(preset: str, num_reports: int) -> list[Row]:
    times_s = _of_batches(preset, num_reports) if is_batch_mode(preset) else _of_reports(preset, num_reports)
    times_ms = 1e3 * np.array(times_s)
    figures = {"mean": float(times_ms.mean()), "p99": float(np.percentile(times_ms, 99)), "max": float(times_ms.max())}
    claim = f"{preset}: {{}} of a report, {NUM_WAITING:,} wait"
    return [Row(claim.format(name), value, TARGET_MS, "ms") for name, value in figures.items()]


def arrivals(seed: int, *, prefixes: bool = False) -> Iterator[SimRequest]:
    """Prompts of about 300 tokens and outputs of about 150, both log-normal, each with a forecast around its length."""
    rng = np.random.default_rng(seed)
    index = 0
    while True:
        prompt_len = int(min(max(rng.lognormal(5.5, 0.7), 16), 2000))
        output_len = int(min(max(rng.lognormal(4.7, 0.8), 2), 1000))
        quantiles = tuple(sorted((output_len * rng.lognormal(0.0, 0.5, 6)).tolist()))
        forecast = Forecast(sum(quantiles) / len(quantiles), quantiles, 1, "benchmark", 0)
        prefix: tuple[int, ...] = ()
        if prefixes:
            family = int(rng.integers(NUM_FAMILIES))
            num_shared = int(rng.integers(1, SHARED_BLOCKS))
            prefix = tuple(range(1 + family * SHARED_BLOCKS, 1 + family * SHARED_BLOCKS + num_shared))
            prompt_len += num_shared * BLOCK_SIZE
        yield SimRequest(f"r{index}", 0.0, prompt_len, output_len, 1024, prefix=prefix, forecast=forecast)
        index += 1


class _Timed:
    """A scheduler whose ``handle`` is timed."""

    def __init__(self, scheduler: ReplicaScheduler) -> None:
        self.times_s: list[float] = []
        self._handle = scheduler.handle
        scheduler.handle = self._timed  # type: ignore[method-assign]

    def _timed(self, event: Event, now: float) -> list[Instruction]:
        began_s = time.thread_time()
        out = self._handle(event, now)
        if isinstance(event, WorkerReported):
            self.times_s.append(time.thread_time() - began_s)
        return out


def _of_reports(preset: str, num_reports: int) -> list[float]:
    """Seconds of each report."""
    by_prefixes = PRESETS[preset].placement.startswith("e2")
    limits = SchedulerLimits(MAX_NUM_SEQS, 16, 0.15)
    scheduler = build_scheduler(preset, limits, PolicySettings(cost=A100_7B.cost))
    timed = _Timed(scheduler)
    shape = ReplicaShape(
        NUM_BLOCKS, BLOCK_SIZE, NUM_HOST_BLOCKS, MAX_NUM_SEQS, 2048, look_every=1, shares_prefixes=by_prefixes
    )
    num_ended = 0

    def ended(record: Record, finished: FinishedSequence) -> None:
        nonlocal num_ended
        num_ended += 1

    replica = Replica("0", scheduler, shape, A100_7B, Recorder(), lambda record, queue_s: None, ended)
    if by_prefixes:
        replica.executor.tell_cache()
    source = arrivals(0, prefixes=by_prefixes)
    num_own = 0

    def submit(num: int, now: float) -> None:
        nonlocal num_own
        requests = []
        for arrival in (next(source) for _ in range(num)):
            own = arrival.prompt_len // BLOCK_SIZE - len(arrival.prefix) if by_prefixes else 0
            num_own += own
            hashes = arrival.prefix + tuple(range(-num_own, own - num_own))
            requests.append((as_request(arrival, hashes), Record(arrival)))
        replica.submit(requests, now)

    now = 0.0
    while scheduler.num_waiting < NUM_WAITING:  # a few at a time, as they come on a server
        submit(50, now)
        if replica.wakes_at < math.inf:
            now = replica.wakes_at
            replica.wake(now)
    num_ended = 0
    gc.collect()
    gc.freeze()
    timed.times_s.clear()
    while len(timed.times_s) < num_reports:
        now = replica.wakes_at
        replica.wake(now)
        if num_ended:
            submit(num_ended, now)
            num_ended = 0
    gc.unfreeze()
    return timed.times_s


def _of_batches(preset: str, num_reports: int) -> list[float]:
    """Seconds of each event that lets a worker pull a batch."""
    cost: StepCost = A100_7B.cost
    settings = BatchSettings(
        memory_tokens=NUM_BLOCKS * BLOCK_SIZE,
        serving_time_s=partial(_batch_s, cost),
        batch=BatchConfig(num_bins=8, max_wait_s=10.0),
        max_num_seqs=MAX_NUM_SEQS,
    )
    scheduler = build_batch_scheduler(preset, settings)
    source = map(as_request, arrivals(0))
    running: deque[tuple[str, tuple[Request, ...]]] = deque()
    now = 0.0

    def handle(event: GlobalEvent) -> float:
        began_s = time.thread_time()
        instructions = scheduler.handle(event, now)
        spent_s = time.thread_time() - began_s
        running.extend((each.replica, each.requests) for each in instructions if isinstance(each, PlaceRequests))
        return spent_s

    def ready(name: str) -> ReplicaUp:
        return ReplicaUp(name, WorkerReady(name, NUM_BLOCKS, BLOCK_SIZE, 4096, True, 0, 0))

    for name in "abcd":
        handle(ready(name))
    while scheduler.num_waiting < NUM_WAITING:
        now += 0.001
        handle(RequestsArrived((replace(next(source), ingress_id="i"),)))
    gc.collect()
    gc.freeze()
    times_s: list[float] = []
    while len(times_s) < num_reports:
        now += 0.05
        name, requests = running.popleft()
        ended = tuple(FinishedSequence(each.request_id, 0, SequenceStatus.FINISHED_STOPPED, 100) for each in requests)
        times_s.append(handle(RequestsEnded(ended)))
        times_s.append(handle(ready(name)))  # as every second
        for _ in range(len(requests)):
            handle(RequestsArrived((replace(next(source), ingress_id="i"),)))
    gc.unfreeze()
    return times_s


def _batch_s(cost: StepCost, batch_size: int, prompt_len: int, output_len: int) -> float:
    context_len = batch_size * prompt_len
    return cost.prefill_s(context_len, 0) + cost.decode_run_s(batch_size, context_len, output_len)
