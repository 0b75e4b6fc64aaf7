"""Replicas follow the delay that is predicted: real components, devices that only take time."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.runtime.names import ROUTER
from core.config.model import ModelConfig
from services.ingress.engine_client import EngineClient
from tests.actors.conftest import CONTINUOUS, open_system
from tests.actors.local_system import ENGINE, NUM_PROMPTS, System, calm_client, eventually, read, rows
from tests.stage import on_stage

NUM_TOKENS = 150
"""A step takes some 10 ms: with two at a time the streams need 12 s on one replica."""


@on_stage(level=1)
def elastic(ray_cluster: None, actor_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    bounds = ModelConfig(name="m", min_replicas=1, max_replicas=3, target_queue_delay_s=3.0, scale_down_after_s=2.0)
    engine = dataclasses.replace(ENGINE, device="emulated:a100-7b", kv_memory="1GiB", max_num_seqs=2)
    tables = {"model": bounds, "engine": engine}
    with open_system("fused", actor_model_dir, tmp_path_factory.mktemp("log"), CONTINUOUS, **tables) as system:
        yield system


async def num_workers(client: EngineClient) -> int:
    return sum(row.kind == "ModelWorker" for row in (await rows(client)).values())


async def test_replicas_come_and_go_with_the_predicted_delay_and_every_stream_ends(elastic: System) -> None:
    async with calm_client(elastic) as client:
        assert await num_workers(client) == 1
        streams = [asyncio.create_task(read(client, index, NUM_TOKENS)) for index in range(NUM_PROMPTS)]
        most_s = 0.0

        async def more() -> bool:
            nonlocal most_s
            status = await client.overview.status()
            most_s = max(most_s, status.queue_delay_s or 0.0)
            return await num_workers(client) > 1

        await eventually(more, "another replica")
        assert most_s > 3.0
        assert {len(tokens) for tokens in await asyncio.gather(*streams)} == {NUM_TOKENS}

        async def fewer() -> bool:
            return await num_workers(client) == 1

        await eventually(fewer, "one replica again")

        async def shown() -> bool:
            return await elastic.metric(ROUTER, "farsight:predicted_queue_delay_seconds") == 0.0

        await eventually(shown, "nobody would wait")
