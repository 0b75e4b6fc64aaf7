"""Replicas on devices that only take time: how many there are follows the predicted delay, and some share a process."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from farsight.actors.runtime.names import ROUTER
from farsight.core.config.engine import EngineConfig, ModelConfig
from farsight.core.config.scheduling import PlacementConfig, SchedulerConfig
from farsight.core.decisions import Facts, unpack_decisions
from farsight.core.messages.status import ComponentStatus, Scale
from farsight.core.request import Origin, SamplingParams
from farsight.services.api.requests import unnamed_request
from farsight.services.ingress.engine_client import EngineClient
from tests.actors.conftest import CONTINUOUS, open_system
from tests.actors.local_system import (
    ENGINE,
    NUM_PROMPTS,
    System,
    calm_client,
    eventually,
    kill,
    patient_rows,
    read,
    ready_rows,
    rows,
)
from tests.stage import on_stage

ELASTIC_TOKENS = 150
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
        streams = [asyncio.create_task(read(client, index, ELASTIC_TOKENS)) for index in range(NUM_PROMPTS)]
        most_s = 0.0

        async def more() -> bool:
            nonlocal most_s
            status = await client.overview.status()
            most_s = max(most_s, status.queue_delay_s or 0.0)
            return await num_workers(client) > 1

        await eventually(more, "another replica")
        assert most_s > 3.0
        assert {len(tokens) for tokens in await asyncio.gather(*streams)} == {ELASTIC_TOKENS}

        async def fewer() -> bool:
            return await num_workers(client) == 1

        await eventually(fewer, "one replica again")

        async def shown() -> bool:
            return await elastic.metric(ROUTER, "farsight:predicted_queue_delay_seconds") == 0.0

        await eventually(shown, "nobody would wait")


@on_stage(level=1)
def crowded(ray_cluster: None, actor_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    tables = {
        "model": ModelConfig(name="m", replicas=2),
        "engine": dataclasses.replace(ENGINE, device="emulated:a100-7b", kv_memory="1GiB", max_num_seqs=2),
        "placement": PlacementConfig(recall=True),
    }
    scheduler = SchedulerConfig(preset="fcfs", standby_slots=0)
    with open_system("fused", actor_model_dir, tmp_path_factory.mktemp("log"), scheduler, **tables) as system:
        yield system


async def test_what_waits_on_one_replica_is_recalled_to_the_other(crowded: System) -> None:
    """In turn each replica gets a request; those of one replica are forty times as long, and two run at a time."""
    origins = [Origin(f"cmpl-{secrets.token_hex(16)}") for _ in range(8)]
    async with calm_client(crowded) as client:
        reads = []
        for index, origin in enumerate(origins):
            num_tokens = 400 if index % 2 else 10
            reads.append(asyncio.create_task(read(client, index, num_tokens, origin=origin)))
            await asyncio.sleep(0.02)  # each is submitted by itself
        answers = await asyncio.gather(*reads)
        assert [len(tokens) for tokens in answers] == [10, 400] * 4

        async def told() -> list[Facts]:
            traces = [each for origin in origins for each in await client.overview.explain(origin.response_id)]
            decisions = (each for trace in traces for each in unpack_decisions(trace.decisions))
            return [each.facts for each in decisions if each.kind == "placed" and "moved_from" in each.facts]

        async def moved() -> bool:
            return len(await told()) > 0

        await eventually(moved, "a request has moved")
        for facts in await told():
            assert facts["because"] == "starved head" and facts["replica"] != facts["moved_from"]


NUM_TOKENS = 400
"""More than a worker makes for a client that does not read: it rests before the end."""


@on_stage(level=1)
def packed(ray_cluster: None, actor_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    tables = {
        "model": ModelConfig(name="m", replicas=3),
        "engine": EngineConfig(device="emulated:a100-7b", kv_memory="1GiB"),
    }
    scheduler = SchedulerConfig(preset="preble")
    with open_system("packed", actor_model_dir, tmp_path_factory.mktemp("log"), scheduler, **tables) as system:
        yield system


def worker_pids(found: dict[str, ComponentStatus]) -> dict[str, int]:
    return {name: row.pid for name, row in found.items() if name.startswith("worker-")}


async def answer(client: EngineClient, prompt: tuple[int, ...]) -> tuple[int, ...]:
    tokens: tuple[int, ...] = ()
    async with aclosing(client.stream(unnamed_request(prompt, SamplingParams(NUM_TOKENS, ignore_eos=True)))) as deltas:
        async for delta in deltas:
            tokens += delta.token_ids
    assert len(tokens) == NUM_TOKENS
    return tokens


async def test_workers_come_and_go_in_one_process(packed: System) -> None:
    async with calm_client(packed) as client:
        before = worker_pids(await patient_rows(client))
        assert (sorted(before), len(set(before.values()))) == (["worker-0", "worker-1", "worker-2"], 1)
        await client.overview.supervisor.scale(Scale("replica", 5))
        more = worker_pids(await patient_rows(client))
        assert (len(more), set(more.values())) == (5, set(before.values()))
        await client.overview.supervisor.scale(Scale("replica", 3))
        assert worker_pids(await patient_rows(client)) == before, "and the process lives on"


async def test_their_death_is_that_of_all_of_them(packed: System) -> None:
    prompt = tuple(range(5, 90))
    async with calm_client(packed) as client:
        expected = await answer(client, prompt)
        async with aclosing(
            client.stream(unnamed_request(prompt, SamplingParams(NUM_TOKENS, ignore_eos=True)))
        ) as deltas:
            tokens = (await anext(deltas)).token_ids
            pids = set(worker_pids(await ready_rows(client)).values())
            kill(pids)
            async for delta in deltas:
                tokens += delta.token_ids
        assert tokens == expected
        assert not pids & set(worker_pids(await ready_rows(client)).values())
