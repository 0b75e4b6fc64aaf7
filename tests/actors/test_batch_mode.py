"""Batch mode with real pieces: whoever forms the batches, and whatever breaks, each stream has the tokens it should."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.names import LOG_STORE, ROUTER
from core.config import EXECUTIONS, BatchConfig, ModelConfig, SchedulerConfig
from core.log_messages import BatchPage, LogQuery
from services.client import EngineClient
from tests.actors.conftest import open_house
from tests.actors.house import ENGINE, House, Truth, calm_client, eventually, kill, read, rows, under_load

NUM_TOKENS = 250
INDEXES = range(8)
KV_MEMORY = "400KiB"
"""800 tokens of this model."""


@pytest.fixture(scope="module")
def magnus(ray_cluster: None, actor_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    scheduler = SchedulerConfig(preset="magnus")
    with open_house("fused", actor_model_dir, tmp_path_factory.mktemp("log"), scheduler) as house:
        yield house


@pytest.fixture(scope="module", params=EXECUTIONS)
def cramped(
    request: pytest.FixtureRequest, ray_cluster: None, actor_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[House]:
    """One worker whose memory holds two or three of the streams to their end, under batches of eight."""
    tables = {
        "model": ModelConfig(name="m", dtype="float32"),
        "engine": dataclasses.replace(ENGINE, kv_memory=KV_MEMORY),
        "batch": BatchConfig(batch_size=8, max_wait_s=1.0),
    }
    scheduler = SchedulerConfig(preset="multi-bin", execution=request.param)
    with open_house("split", actor_model_dir, tmp_path_factory.mktemp("log"), scheduler, **tables) as house:
        yield house


async def read_all(client: EngineClient, truth: Truth) -> None:
    streams = await asyncio.gather(*(read(client, index, NUM_TOKENS) for index in INDEXES))
    for index, tokens in zip(INDEXES, streams, strict=True):
        truth.check(index, tokens, NUM_TOKENS)


async def num_batches(house: House) -> int:
    return len((await house.ask(LOG_STORE, "read_batches", LogQuery(0, 1000), BatchPage)).records)


async def test_batches_give_the_tokens_of_continuous_batching_and_are_logged(magnus: House, truth: Truth) -> None:
    async with calm_client(magnus) as client:
        assert (await rows(client))[ROUTER].kind == "Batcher"
        before = await num_batches(magnus)
        await read_all(client, truth)

    async def logged() -> bool:
        return await num_batches(magnus) > before

    await eventually(logged, "batches in the log")


@pytest.mark.parametrize("names", [("worker-0",), ("worker-0", "worker-1"), ("router",)], ids=" and ".join)
async def test_no_stream_notices_a_death(magnus: House, truth: Truth, names: tuple[str, ...]) -> None:
    async with calm_client(magnus) as client:
        async with under_load(client, truth):
            before = await rows(client)
            kill({before[name].pid for name in names})
        truth.check(3, await read(client, 3, 20), 20)


async def test_a_batch_that_runs_out_of_memory_is_split_and_nobody_notices(cramped: House, truth: Truth) -> None:
    async with calm_client(cramped) as client:
        await read_all(client, truth)
    splits = await cramped.metric(ROUTER, "farsight:batch_splits_total")
    assert splits >= 1
