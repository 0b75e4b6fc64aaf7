"""Batch mode with real components: whoever forms the batches, and whatever breaks, each stream has the tokens it
should."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from farsight.actors.runtime.names import LOG_STORE, ROUTER
from farsight.core.config.engine import ModelConfig
from farsight.core.config.scheduling import BatchConfig, SchedulerConfig
from farsight.core.messages.log import BatchPage, LogQuery
from farsight.core.messages.status import Scale
from farsight.policies.event_log import read_log
from farsight.policies.fleet.events import PlaceRequests, ReplicaBroke
from farsight.services.ingress.engine_client import EngineClient
from tests.actors.conftest import open_system
from tests.actors.local_system import (
    ENGINE,
    NUM_PROMPTS,
    PROMPTS,
    Reading,
    System,
    Truth,
    calm_client,
    eventually,
    kill,
    patient_rows,
    read,
    ready_rows,
    sampling,
    under_load,
)
from tests.stage import on_stage

NUM_TOKENS = 250
INDEXES = range(8)
KV_MEMORY = "400KiB"
"""800 tokens of this model."""
RELOAD_S = 1.0


@on_stage(level=1)
def magnus(ray_cluster: None, actor_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    scheduler = SchedulerConfig(preset="magnus")
    with open_system("fused", actor_model_dir, tmp_path_factory.mktemp("log"), scheduler) as system:
        yield system


@on_stage(
    level=1,
    params=[
        ("cpu", KV_MEMORY, "ragged"),
        pytest.param(("cpu", KV_MEMORY, "static"), marks=pytest.mark.nightly),
        pytest.param(("emulated:a100-7b", "400MiB", "ragged"), marks=pytest.mark.nightly),  # 512 KiB a token
    ],
    ids=lambda param: f"{param[0]} {param[2]}",
)
def cramped(
    request: pytest.FixtureRequest, ray_cluster: None, actor_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[System]:
    """One worker whose memory holds two or three of the streams to their end, under batches of eight."""
    device, kv_memory, execution = request.param
    tables = {
        "model": ModelConfig(name="m", dtype="float32"),
        "engine": dataclasses.replace(ENGINE, device=device, kv_memory=kv_memory),
        "batch": BatchConfig(batch_size=8, max_wait_s=1.0, reload_s=RELOAD_S),
    }
    folder = tmp_path_factory.mktemp("log")
    scheduler = SchedulerConfig(preset="multi-bin", execution=execution, event_log=str(folder / "events"))
    with open_system("split", actor_model_dir, folder, scheduler, **tables) as system:
        yield system


async def read_all(client: EngineClient, truth: Truth) -> None:
    streams = await asyncio.gather(*(read(client, index, NUM_TOKENS) for index in INDEXES))
    for index, tokens in zip(INDEXES, streams, strict=True):
        truth.check(index, tokens, NUM_TOKENS)


async def num_batches(system: System) -> int:
    return len((await system.ask(LOG_STORE, "read_batches", LogQuery(0, 1000), BatchPage)).records)


async def test_batches_give_the_tokens_of_continuous_batching_and_are_logged(magnus: System, truth: Truth) -> None:
    async with calm_client(magnus) as client:
        assert (await patient_rows(client))[ROUTER].kind == "Batcher"
        before = await num_batches(magnus)
        await read_all(client, truth)

    async def logged() -> bool:
        return await num_batches(magnus) > before

    await eventually(logged, "batches in the log")


@pytest.mark.parametrize("names", [("worker-0",), ("worker-0", "worker-1"), ("router",)], ids=" and ".join)
async def test_no_stream_notices_a_death(magnus: System, truth: Truth, names: tuple[str, ...]) -> None:
    async with calm_client(magnus) as client:
        async with under_load(client, truth):
            before = await ready_rows(client)
            kill({before[name].pid for name in names})
        truth.check(3, await read(client, 3, 20), 20)


async def test_a_batch_that_runs_out_of_memory_is_split_its_worker_reloads_and_nobody_notices(
    cramped: System, truth: Truth
) -> None:
    async with calm_client(cramped) as client:
        streams = await asyncio.gather(*(read(client, index, NUM_TOKENS) for index in INDEXES))
    for index, tokens in zip(INDEXES, streams, strict=True):
        if cramped.site.config.engine.device == "cpu":
            truth.check(index, tokens, NUM_TOKENS)
        else:
            assert len(tokens) == NUM_TOKENS, "an emulated device has tokens of its own"
    assert await cramped.metric(ROUTER, "farsight:batch_splits_total") >= 1
    pauses = pauses_after_breaks(cramped.site.config.scheduler.event_log)
    assert pauses and min(pauses) >= RELOAD_S, pauses


def pauses_after_breaks(event_log: str) -> list[float]:
    """From each end of a batch that broke off to the next batch, on the only worker; seconds."""
    (log,) = Path(event_log).glob(f"{ROUTER}*")
    broke_at: float | None = None
    pauses: list[float] = []
    for each in read_log(log.read_bytes())[1]:
        if broke_at is not None and any(isinstance(said, PlaceRequests) for said in each.instructions):
            pauses.append(each.now - broke_at)
            broke_at = None
        if isinstance(each.event, ReplicaBroke) and broke_at is None:
            broke_at = each.now
    return pauses


@on_stage(level=1, params=["magnus", pytest.param("multi-bin", marks=pytest.mark.nightly)])
def pulling(
    request: pytest.FixtureRequest, ray_cluster: None, actor_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[System]:
    """Workers that only take time, and batches of four at most: there is always one that waits for an idle worker."""
    tables = {
        "engine": dataclasses.replace(ENGINE, device="emulated:a100-7b", kv_memory="1GiB"),
        "batch": BatchConfig(batch_size=4, max_wait_s=0.2, num_bins=2),
    }
    scheduler = SchedulerConfig(preset=request.param)
    with open_system("fused", actor_model_dir, tmp_path_factory.mktemp("log"), scheduler, **tables) as system:
        yield system


@asynccontextmanager
async def kept_busy(client: EngineClient) -> AsyncIterator[Callable[[], Coroutine[Any, Any, bool]]]:
    """Every prompt is sent again and again, always to the same answer; yields what says whether each has been since."""
    expected = await asyncio.gather(*(read(client, index, 40) for index in range(NUM_PROMPTS)))
    num_done = [0] * NUM_PROMPTS
    ends = asyncio.Event()

    async def repeat(index: int) -> None:
        while not ends.is_set():
            assert await read(client, index, 40) == expected[index]
            num_done[index] += 1

    tasks = [asyncio.create_task(repeat(index)) for index in range(NUM_PROMPTS)]

    async def answered() -> bool:
        assert not any(task.done() for task in tasks), "a client has got another answer"
        if min(num_done) < 2:
            return False
        num_done[:] = [0] * NUM_PROMPTS
        return True

    yield answered
    ends.set()
    await asyncio.gather(*tasks)


async def test_idle_workers_pull_from_one_queue_while_others_come_and_go_and_die(pulling: System) -> None:
    async with calm_client(pulling) as client, kept_busy(client) as answered:

        async def newest_runs() -> bool:
            newest = (await patient_rows(client))["worker-2"]
            return newest.state == "ready" and newest.queue > 0

        await client.overview.supervisor.scale(Scale("replica", 3))
        await eventually(newest_runs, "the new worker pulls")
        kill({(await patient_rows(client))["worker-2"].pid})
        await eventually(answered, "the others serve on")
        await eventually(newest_runs, "it is back and pulls")
        await client.overview.supervisor.scale(Scale("replica", 1))
        await eventually(answered, "one serves on")
        await client.overview.supervisor.scale(Scale("replica", 2))
        await eventually(answered, "two serve on")
    batches = (await pulling.ask(LOG_STORE, "read_batches", LogQuery(0, 1000), BatchPage)).records
    assert {batch.worker for batch in batches} == {"0", "1", "2"}
    assert max(batch.num_requests for batch in batches) == 4


async def test_the_requests_of_a_worker_that_dies_with_a_batch_wait_again_and_another_one_pulls_them(
    pulling: System,
) -> None:
    async with calm_client(pulling) as client:
        undisturbed = await asyncio.gather(*(read(client, index, 200) for index in range(8)))
        pid = (await ready_rows(client))["worker-1"].pid
        host = pulling.host("worker-1")  # asked directly: in the time of a whole status a batch may come to its end
        readings = [Reading(client, PROMPTS[index], sampling(index, 200)) for index in range(8)]

        async def running() -> bool:
            (row,) = (await host.rows.remote()).components
            return row.queue > 0 and any(reading.tokens for reading in readings)

        await eventually(running, "a batch runs")
        kill({pid})
        assert [await reading.finish() for reading in readings] == list(undisturbed)
        records = await pulling.log(*(reading.request_id for reading in readings))
        moved = [record for record in records if record.attempts > 1]
        assert 1 <= len(moved) <= 4, "those of one batch"
