"""The simulator's batch mode beside what serves: prices of an emulated device, and machines that can be replayed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farsight.actors.scheduling.event_recorder import EventRecorder, recorded
from farsight.core.config.scheduling import BatchConfig, SchedulerConfig
from farsight.core.costs import StepCost
from farsight.core.forecast import QUANTILES, Forecast
from farsight.core.messages.plans import Plan, Slot
from farsight.core.request import Request, SamplingParams
from farsight.engine.devices.emulated import EmulatedRunner, Pace
from farsight.engine.sequence import Sequence
from farsight.kvcache import BatchLimits, BlockManager, StaticExecutor
from farsight.policies.batching.fcfs import FcfsBatches
from farsight.policies.compose import build_batch_runner, configured_batch_scheduler, configured_replica
from farsight.policies.event_log import BatchMachineConfig, MachineConfig, read_log, replay
from farsight.policies.fleet.batch_scheduler import BatchScheduler
from farsight.policies.fleet.events import BatchEnded, PlaceRequests, ReplicaBroke
from farsight.policies.kv.split_batch import SplitBatch
from farsight.policies.order.offload_orders import OffloadDecider
from farsight.policies.replica.scheduler import ReplicaScheduler
from farsight.simulator.cluster.fleet import Fleet, FleetShape
from farsight.simulator.cluster.latency import LinearLatency
from farsight.simulator.cluster.replica import ReplicaShape
from farsight.simulator.traffic.workload import SimRequest

COST = StepCost(0.01, 1e-3, 2e-3, 3e-5, 4e-7)
"""Every kind of work has a price of its own."""

NUM_REQUESTS = 80

LENS = ((9, 4), (30, 17), (1, 1), (16, 40), (23, 2))
"""Prompt and output tokens; what stops, stops before its limit of 64 tokens."""


def emulated_s(max_batch_tokens: int) -> float:
    """Seconds that a worker takes for a batch of ``LENS`` on an emulated device, step by step."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    runner = EmulatedRunner(COST, [7], Pace(lambda: now, sleep))
    executor = StaticExecutor(BlockManager(200, 16), BatchLimits(8, max_batch_tokens), "w", 128)
    requests = [Request(f"r{i}", 0, "i", (1,) * prompt, SamplingParams(64)) for i, (prompt, _) in enumerate(LENS)]
    sequences = {request.request_id: Sequence.of(request) for request in requests}
    executor.make_sequence = lambda request: sequences[request.request_id]
    executor.apply_plan(
        Plan("w", 0, 1, 0, 0, tuple(Slot(each.request_id, 0, 0, 0, False, 0, each) for each in requests))
    )
    while (batch := executor.next_batch()) is not None:
        tokens = runner.execute(batch, sequences)
        stopped = []
        for item, token in zip(batch.items, tokens, strict=True):
            sequence = sequences[item.request_id]
            if token is not None:
                sequence.token_ids.append(token)
            if len(sequence.token_ids) - sequence.prompt_len == LENS[int(item.request_id[1:])][1]:
                stopped.append(item.request_id)
        if executor.commit(batch, stopped):
            return now
    raise AssertionError("the batch lacks blocks")


@pytest.mark.parametrize("max_batch_tokens", [7, 64, 149, 1000])
def test_a_batch_takes_as_long_as_on_an_emulated_device(max_batch_tokens: int) -> None:
    """Padded prompts in chunks or at once, once with a last chunk of one pad; then invalid tokens."""
    shape = ReplicaShape(200, 16, max_num_seqs=8, max_batch_tokens=max_batch_tokens, execution="static")
    machine = BatchScheduler(FcfsBatches(8), lambda *batch: 1.0)
    fleet = Fleet(FleetShape(shape, LinearLatency(COST)), machine, lambda _: build_batch_runner(8))
    done = fleet.run([SimRequest(f"r{i}", 0.0, *lens, 64) for i, lens in enumerate(LENS)]).done
    assert {record.finished_at for record in done} == {done[0].finished_at} and len(done) == len(LENS)
    assert done[0].finished_at == pytest.approx(emulated_s(max_batch_tokens), rel=1e-12)


def wrongly_predicted() -> list[SimRequest]:
    """Outputs of which half are far longer than predicted, so that batches run out of memory."""
    rng, made = np.random.default_rng(3), []
    for i in range(NUM_REQUESTS):
        output_len = int(rng.integers(1, 200))
        mean = float(rng.choice([output_len, 10]))
        forecast = Forecast(mean, (mean,) * len(QUANTILES), 1, "given", 1)
        made.append(SimRequest(str(i), i * 0.05, int(rng.integers(1, 60)), output_len, 200, forecast=forecast))
    return made


def simulated_logs(preset: str, directory: Path) -> tuple[bytes, list[bytes]]:
    """The event logs of a simulated life in which batches break off: of the central machine, and of each replica's."""
    config, max_num_seqs = SchedulerConfig(preset=preset, event_log=str(directory)), 16
    central = EventRecorder("router", BatchMachineConfig(config, BatchConfig(), max_num_seqs, 0.0))
    recorders = [EventRecorder(f"scheduler-{index}", MachineConfig(config, max_num_seqs)) for index in range(2)]
    times = central.asking(lambda size, prompt_len, output_len: 1e-3 * size * (prompt_len + output_len))
    machine = configured_batch_scheduler(config, BatchConfig(), max_num_seqs, times)
    _record(machine, central)

    def make_scheduler(index: int) -> ReplicaScheduler:
        scheduler = configured_replica(config, max_num_seqs)
        _record(scheduler, recorders[index])
        return scheduler

    shape = ReplicaShape(60, 16, max_num_seqs=max_num_seqs, max_batch_tokens=512, execution="static")
    fleet = Fleet(
        FleetShape(shape, LinearLatency(COST), 2, announce_s=0.5),
        machine,
        make_scheduler,
        make_offload=lambda _: OffloadDecider(SplitBatch(), None),
    )
    assert len(fleet.run(wrongly_predicted()).done) == NUM_REQUESTS
    for each in (central, *recorders):
        each.close()
    return central.path.read_bytes(), [each.path.read_bytes() for each in recorders]


def _record(machine: Any, recorder: EventRecorder) -> None:
    handle: Callable[..., Any] = recorded(machine.handle, recorder)
    machine.handle = handle


@pytest.mark.parametrize("preset", ["magnus", "magnus-vs", "magnus-glp", "multi-bin"])
def test_what_a_simulated_batcher_said_a_live_one_says(preset: str, tmp_path: Path) -> None:
    """The machines of a server, built from their configurations and told the simulated events, answer the same."""
    central, replicas = simulated_logs(preset, tmp_path)
    handled = list(read_log(central)[1])
    assert replay(central) == (len(handled), None)
    for log in replicas:
        count, difference = replay(log)
        assert difference is None and count > 10
    placed = [each for one in handled for each in one.instructions if isinstance(each, PlaceRequests)]
    assert {request.request_id for each in placed for request in each.requests} == {str(i) for i in range(NUM_REQUESTS)}
    assert any(isinstance(each, BatchEnded) for one in handled for each in one.instructions)
    assert any(isinstance(one.event, ReplicaBroke) for one in handled) or preset == "multi-bin"
