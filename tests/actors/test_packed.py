"""Workers of emulated devices that share a process: more and fewer of them, and the death of all at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from core.config.engine import EngineConfig
from core.config.model import ModelConfig
from core.config.scheduling import SchedulerConfig
from core.messages.status import ComponentStatus, Scale
from core.request import SamplingParams
from services.api.requests import unnamed_request
from services.ingress.engine_client import EngineClient
from tests.actors.conftest import open_system
from tests.actors.local_system import System, calm_client, kill, patient_rows, ready_rows
from tests.stage import on_stage

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
