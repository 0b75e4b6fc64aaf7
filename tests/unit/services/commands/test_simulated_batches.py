"""The simulator beside a live life of batch mode: the same arrivals and the same ends of batches, the same batches."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from core.config.engine import EngineConfig
from core.config.learning import PredictorConfig
from core.config.load import FarsightConfig
from core.config.log import LogConfig
from core.config.model import ModelConfig
from core.config.scheduling import SchedulerConfig
from core.costs import FREE_IMAGES, StepCost
from core.forecast import Forecast
from core.messages.plans import WorkerReady
from core.request import Request, SamplingParams
from policies.compose import build_batch_runner, configured_batch_scheduler
from policies.event_log import BatchMachineConfig, BatchShape, read_log
from policies.fleet.events import GlobalEvent, GlobalInstruction, HistoryLearned, PlaceRequests, ReplicaUp
from policies.replica.events import RequestsArrived
from services.api.requests import unnamed_request
from services.ingress.engine_client import EngineClient
from simulator.cluster.fleet import Fleet, FleetShape
from simulator.cluster.replica import ReplicaShape
from simulator.traffic.workload import SimRequest
from tests.unit.actors.components import LONG_S, until
from tests.unit.services.local_system import local_system

NUM_STREAMS = 24


async def serve(preset: str, directory: Path) -> None:
    """Leaves the event log of a Batcher whose clients all read to the end, over a pool that holds every batch."""
    config = FarsightConfig(
        model=ModelConfig(name="m", dtype="float32"),
        engine=EngineConfig(kv_memory="16MiB", max_num_seqs=6, num_threads=1, backend="torch"),
        scheduler=SchedulerConfig(preset=preset, execution="static", event_log=str(directory)),
        log=LogConfig(path=str(directory / "log.sqlite")),
        predictor=PredictorConfig(from_traffic=False),  # the log does not say what was forecast for whom
    )
    async with asyncio.timeout(LONG_S), local_system(config) as found:
        async with found.ingress() as client:
            streams = []
            for index in range(NUM_STREAMS):
                streams.append(asyncio.create_task(read(client, index)))
                await asyncio.sleep(0.01)
            await asyncio.gather(*streams)
        await until(lambda: found.router.queue == 0)


async def read(client: EngineClient, index: int) -> None:
    params = SamplingParams(4 + 7 * index % 40, ignore_eos=True)
    request = unnamed_request(tuple(range(5, 15 + 3 * index)), params)
    async with aclosing(client.stream(request)) as deltas:
        async for _ in deltas:
            pass


@dataclass
class Life:
    """What a log says of one worker.

    Attributes:
        arrivals: With the forecast that each request had when it was put into a batch; outputs count as one token.
        batches: Ids of the requests of each batch, in the order in which they were pulled.
        durations_s: How long each batch ran.
        answers: Serving times that the machine was told, and when, by the batch that it asked about.
    """

    config: BatchMachineConfig
    ready: WorkerReady
    arrivals: list[SimRequest] = field(default_factory=list)
    batches: list[list[str]] = field(default_factory=list)
    durations_s: list[float] = field(default_factory=list)
    answers: defaultdict[BatchShape, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))


def logged_life(directory: Path) -> Life:
    (path,) = directory.glob("router-*.events")
    config, events = read_log(path.read_bytes())
    assert isinstance(config, BatchMachineConfig)
    handled = list(events)
    ready = next(each.event.ready for each in handled if isinstance(each.event, ReplicaUp))
    life, usual, began_at = Life(config, ready), None, None
    current: dict[BatchShape, float] = {}
    machine = configured_batch_scheduler(
        config.scheduler, config.batch, config.max_num_seqs, lambda *shape: current[shape], config.forecast_wait_s
    )
    for each in handled:
        match each.event:
            case HistoryLearned(forecast):
                usual = forecast
            case RequestsArrived(requests):
                life.arrivals += [_arrival(request, each.now, usual) for request in requests]
        for shape, estimate_s in each.estimates_s.items():
            life.answers[shape].append((each.now, estimate_s))
        current = each.estimates_s
        machine.handle(each.event, each.now)
        placed = [one for one in each.instructions if isinstance(one, PlaceRequests)]
        if began_at is not None and (placed or not machine.num_on("0")):
            life.durations_s.append(each.now - began_at)
            began_at = None
        for one in placed:
            life.batches.append([request.request_id for request in one.requests])
            began_at = each.now
    return life


def _arrival(request: Request, now: float, usual: Forecast | None) -> SimRequest:
    assert request.attempt == 0, "nothing was lost"
    limit = request.sampling.max_new_tokens
    forecast = usual if request.forecast is None else request.forecast
    return SimRequest(request.request_id, now, request.prompt_len, 1, limit, forecast=forecast)


class RecordedTimes:
    """Steps that last as long as the batches of a life: each batch of one-token outputs is one step.

    Attributes:
        batches: Batches that the simulated worker has pulled; the last one runs.
    """

    cost = StepCost(1.0, 0.0, 0.0, 0.0)

    def __init__(self, life: Life) -> None:
        self._life = life
        self.fleet: Fleet | None = None
        self.batches: list[list[str]] = []

    def step_s(self, prefill_tokens: int, decode_seqs: int, context_tokens: int, prefill_pairs: int = 0) -> float:
        assert not decode_seqs
        return self._life.durations_s[len(self.batches) - 1]

    def decode_run_s(self, decode_seqs: int, context_tokens: int, num_steps: int) -> float:
        raise AssertionError("a batch is one step")

    def copy_s(self, num_tokens: int) -> float:
        raise AssertionError("nothing is copied")

    image_cost = FREE_IMAGES

    def serving_time_s(self, *shape: int) -> float:
        """What the live machine was told at this instant."""
        assert self.fleet is not None
        now = self.fleet.now
        return min(self._life.answers[shape], key=lambda each: abs(each[0] - now))[1]  # type: ignore[index]


def simulated_batches(life: Life) -> list[list[str]]:
    """The batches that a simulated worker pulls where requests come, and batches end, as they did live."""
    config, times = life.config, RecordedTimes(life)
    machine = configured_batch_scheduler(config.scheduler, config.batch, config.max_num_seqs, times.serving_time_s)
    handle = machine.handle

    def noted(event: GlobalEvent, now: float) -> list[GlobalInstruction]:
        out = handle(event, now)
        placed = [one.requests for one in out if isinstance(one, PlaceRequests)]
        times.batches += [[request.request_id for request in requests] for requests in placed]
        return out

    machine.handle = noted  # type: ignore[method-assign]
    shape = ReplicaShape(
        life.ready.num_blocks,
        life.ready.block_size,
        max_num_seqs=config.max_num_seqs,
        max_batch_tokens=1 << 30,
        execution="static",
    )
    times.fleet = Fleet(FleetShape(shape, times), machine, lambda _: build_batch_runner(config.max_num_seqs))
    assert len(times.fleet.run(life.arrivals).done) == NUM_STREAMS
    return times.batches


@pytest.mark.parametrize("preset", ["magnus-vs", "magnus"])
async def test_the_simulator_forms_the_batches_that_a_server_formed(preset: str, tmp_path: Path) -> None:
    await serve(preset, tmp_path)
    life = logged_life(tmp_path)
    assert len(life.batches) == len(life.durations_s) > 2
    assert max(map(len, life.batches)) > 1, "requests have waited"
    assert simulated_batches(life) == life.batches
