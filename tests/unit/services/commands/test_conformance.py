"""A live machine's decisions follow from what it was told: told again, a fresh machine answers the same; and where
requests come, and batches end, as they did live, the simulator forms the same batches."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgpack
import pytest

from farsight.actors.scheduling.event_recorder import EventRecorder
from farsight.core.config.engine import EngineConfig, ModelConfig
from farsight.core.config.learning import LogConfig, PredictorConfig
from farsight.core.config.load import FarsightConfig
from farsight.core.config.scheduling import BatchConfig, SchedulerConfig
from farsight.core.costs import FREE_IMAGES, StepCost
from farsight.core.errors import ConfigError, MessageError
from farsight.core.forecast import QUANTILES, Forecast
from farsight.core.messages.plans import FinishedSequence, WorkerReady
from farsight.core.request import Origin, Request, SamplingParams, SequenceStatus
from farsight.policies.compose import build_batch_runner, configured_batch_scheduler
from farsight.policies.event_log import (
    SCHEMA_VERSION,
    BatchMachineConfig,
    BatchShape,
    MachineConfig,
    pack_config,
    pack_handled,
    read_log,
    replay,
)
from farsight.policies.fleet.events import GlobalEvent, GlobalInstruction, HistoryLearned, PlaceRequests, ReplicaUp
from farsight.policies.presets import PRESETS
from farsight.policies.replica.events import (
    CostLearned,
    PromisesMade,
    RequestEnded,
    RequestsAborted,
    RequestsArrived,
    WorkerLost,
    WorkerReported,
)
from farsight.services.api.requests import unnamed_request
from farsight.services.commands.conformance import main
from farsight.services.ingress.engine_client import EngineClient
from farsight.services.local.system import LocalSystem, local_system
from farsight.simulator.cluster.fleet import Fleet, FleetShape
from farsight.simulator.cluster.replica import ReplicaShape
from farsight.simulator.traffic.workload import SimRequest
from tests.unit.actors.components import LONG_S, until

CONTINUOUS = [name for name, preset in PRESETS.items() if preset.mode == "continuous"]
IN_BATCHES = ["magnus", "multi-bin"]
FORECAST = Forecast(20.0, tuple(20.0 + level for level in QUANTILES), 5, "history", 3)
NUM_STREAMS = 20
COST = StepCost(1e-3, 1e-5, 1e-4, 1e-8)


@asynccontextmanager
async def system(preset: str, directory: Path) -> AsyncIterator[LocalSystem]:
    """With a pool that does not hold all that is asked for."""
    config = FarsightConfig(
        model=ModelConfig(name="m", dtype="float32"),
        engine=EngineConfig(kv_memory="768KiB", host_kv_memory="1MiB", max_num_seqs=6, num_threads=1, backend="torch"),
        scheduler=SchedulerConfig(preset=preset, standby_slots=4, quantum_s=0.01, event_log=str(directory)),
        log=LogConfig(path=str(directory / "log.sqlite")),
    )
    async with local_system(config, forecasts=False) as found:
        yield found


async def read(client: EngineClient, index: int) -> None:
    """Every fifth client leaves early."""
    prompt = tuple(range(5, 15 + 3 * index))
    params = SamplingParams(10 + 7 * index % 40, ignore_eos=True)
    async with aclosing(client.stream(unnamed_request(prompt, params, origin=Origin(f"cmpl-{index:032x}")))) as deltas:
        async for delta in deltas:
            if delta.token_ids and index % 5 == 4:
                return


async def serve(found: LocalSystem) -> None:
    """Every stream to its end; forecasts come while they run."""
    async with found.ingress() as client:
        streams: list[asyncio.Task[None]] = []
        for index in range(NUM_STREAMS):
            streams.append(asyncio.create_task(read(client, index)))
            await asyncio.sleep(0.005)
        client._foresee([(request_id, FORECAST) for request_id in client._streams])
        await asyncio.gather(*streams)


@pytest.mark.parametrize("preset", CONTINUOUS)
async def test_what_a_live_scheduler_said_is_said_again(preset: str, tmp_path: Path) -> None:
    async with asyncio.timeout(LONG_S), system(preset, tmp_path) as found:
        found.scheduler()._handle(CostLearned(COST))  # so that ends are promised, which accounts say
        await serve(found)
        machine = found.machine()  # its clients hear of ends first
        await until(lambda: machine.num_waiting + machine.num_admitted == 0)
    data = the_log(tmp_path, "scheduler-0")
    count, difference = replay(data)
    assert difference is None
    events = [each.event for each in read_log(data)[1]]
    assert len(events) == count
    assert sum(len(event.requests) for event in events if isinstance(event, RequestsArrived)) == NUM_STREAMS
    instructions = [each for handled in read_log(data)[1] for each in handled.instructions]
    assert any(each.promises for each in instructions if isinstance(each, PromisesMade))
    ended = {each.finished.request_id for each in instructions if isinstance(each, RequestEnded)}
    # The Router may hear of a stream's end sooner than the Scheduler, by the next announcement.
    aborted = {rid for event in events if isinstance(event, RequestsAborted) for rid, _ in event.keys}
    assert ended and len(ended | aborted) == NUM_STREAMS
    assert sum(isinstance(event, WorkerReported) for event in events) > 5


@pytest.mark.parametrize("preset", IN_BATCHES)
async def test_what_a_live_batcher_said_is_said_again(preset: str, tmp_path: Path) -> None:
    """So do the Scheduler under it, and the choice between waiting batches by serving times that were learned."""
    async with asyncio.timeout(LONG_S), system(preset, tmp_path) as found:
        await serve(found)
        await until(lambda: found.router.queue == 0)
    assert replay(the_log(tmp_path, "scheduler-0"))[1] is None
    data = the_log(tmp_path, "router")
    count, difference = replay(data)
    assert difference is None
    handled = list(read_log(data)[1])
    assert len(handled) == count
    asked = [each.estimates_s for each in handled if each.estimates_s]
    instructions = [each for one in handled for each in one.instructions]
    placed = [
        request.request_id for each in instructions if isinstance(each, PlaceRequests) for request in each.requests
    ]
    assert len(set(placed)) == NUM_STREAMS
    assert asked, "each batch that is placed has an estimate"


def the_log(directory: Path, machine: str) -> bytes:
    (path,) = directory.glob(f"{machine}-*.events")
    return path.read_bytes()


CONFIG = pack_config(MachineConfig(SchedulerConfig(), 8))
LOST, UP = WorkerLost(), ReplicaUp("0", WorkerReady("w1", 1000, 16, 4000, False, 100))
ONE = CONFIG + pack_handled(LOST, 1.0, [])


def test_a_serving_time_that_the_log_lacks_is_a_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batches = BatchMachineConfig(SchedulerConfig(preset="magnus"), BatchConfig(), 8, 0.0)
    request = Request("a", 0, "i", (1,) * 8, SamplingParams(64))
    log, path = pack_config(batches) + pack_handled(UP, 1.0, []), tmp_path / "router.events"
    arrived, placed = RequestsArrived((request,)), PlaceRequests("0", (request,))
    path.write_bytes(log + pack_handled(arrived, 2.0, [placed]))
    assert main([str(path)]) == 1
    batch = "1 requests, 8 prompt tokens and 64 output tokens"
    assert f"and now asks for the serving time of a batch of {batch}, which" in capsys.readouterr().out
    path.write_bytes(log + pack_handled(arrived, 2.0, [placed], {(1, 8, 64): 0.5}))
    assert main([str(path)]) == 0


@pytest.mark.parametrize("version", [1, SCHEMA_VERSION + 1])
def test_a_log_of_another_version_is_refused(version: int) -> None:
    """Version 1 had a head of the configuration alone."""
    _, message = msgpack.unpackb(CONFIG)
    head = msgpack.packb([message] if version == 1 else [version, message])
    with pytest.raises(MessageError, match=f"schema version.*{version}.*{SCHEMA_VERSION}; replay this log with the"):
        replay(head + pack_handled(LOST, 1.0, []))


def test_another_answer_is_found_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_up = RequestEnded(FinishedSequence("a", 0, SequenceStatus.FINISHED_STOPPED, 3), 0.0, 1.0)
    log = ONE + pack_handled(LOST, 2.0, [made_up])
    count, difference = replay(log)
    assert count == 2 and difference is not None
    assert (difference.index, difference.logged, difference.replayed) == (1, (made_up,), ())
    good, bad = tmp_path / "good.events", tmp_path / "bad.events"
    good.write_bytes(ONE)
    bad.write_bytes(log)
    assert main([str(good)]) == 0
    assert capsys.readouterr().out == f"{good}: 1 events, identical\n"
    assert main([str(good), str(bad), str(tmp_path / "none")]) == 1
    out, err = capsys.readouterr()
    assert "event 1 (WorkerLost) gave RequestEnded(" in out and "and now nothing" in out
    assert "No such file" in err


def test_a_record_that_is_cut_off_is_left_out() -> None:
    second = pack_handled(WorkerLost(), 2.0, [])
    for cut in range(1, len(second)):
        assert replay(ONE + second[:cut]) == (1, None)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x01",
        pack_handled(LOST, 1.0, []),
        CONFIG + b"\x93\x01\x02\x03",
        CONFIG + msgpack.packb([1.0, [["a", "list"], b""], [], []]),
        CONFIG + pack_handled(UP, 1.0, []),
        msgpack.packb([SCHEMA_VERSION, ["MachineConfig", "text"]]),
    ],
)
def test_what_is_no_event_log_is_refused(data: bytes) -> None:
    with pytest.raises(MessageError):
        replay(data)


def test_a_directory_that_cannot_be_had_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"scheduler\.event_log"):
        EventRecorder("scheduler-0", MachineConfig(SchedulerConfig(event_log=str(tmp_path / "file")), 8))


NUM_CLIENTS = 24


async def serve_batches(preset: str, directory: Path) -> None:
    """Leaves the event log of a Batcher whose clients all read to the end, over a pool that holds every batch."""
    config = FarsightConfig(
        model=ModelConfig(name="m", dtype="float32"),
        engine=EngineConfig(kv_memory="16MiB", max_num_seqs=6, num_threads=1, backend="torch"),
        scheduler=SchedulerConfig(preset=preset, execution="static", event_log=str(directory)),
        log=LogConfig(path=str(directory / "log.sqlite")),
        predictor=PredictorConfig(from_traffic=False),  # the log does not say what was forecast for whom
    )
    async with asyncio.timeout(LONG_S), local_system(config, forecasts=False) as found:
        async with found.ingress() as client:
            streams = []
            for index in range(NUM_CLIENTS):
                streams.append(asyncio.create_task(read_whole(client, index)))
                await asyncio.sleep(0.01)
            await asyncio.gather(*streams)
        await until(lambda: found.router.queue == 0)


async def read_whole(client: EngineClient, index: int) -> None:
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
    assert len(times.fleet.run(life.arrivals).done) == NUM_CLIENTS
    return times.batches


@pytest.mark.parametrize("preset", ["magnus-vs", "magnus"])
async def test_the_simulator_forms_the_batches_that_a_server_formed(preset: str, tmp_path: Path) -> None:
    await serve_batches(preset, tmp_path)
    life = logged_life(tmp_path)
    assert len(life.batches) == len(life.durations_s) > 2
    assert max(map(len, life.batches)) > 1, "requests have waited"
    assert simulated_batches(life) == life.batches
