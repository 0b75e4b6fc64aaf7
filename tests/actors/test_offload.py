"""The KVOffloadManager decides whose KV moves; where it dies the Scheduler decides alone, and no stream notices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from farsight.actors.runtime.names import kv_offload_manager_name, scheduler_name
from farsight.core.config.engine import ModelConfig
from farsight.core.config.scheduling import SchedulerConfig
from tests.actors.conftest import open_system
from tests.actors.local_system import ENGINE, System, Truth, calm_client, eventually, under_load
from tests.actors.test_deaths import kill_components, wait_successors
from tests.stage import on_stage

DECISIONS = "farsight:offload_decisions_total"


@on_stage(level=1)
def short_of_memory(
    ray_cluster: None, actor_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[System]:
    """One replica under FastServe whose pool is too small for the load: KV goes out to the host and comes back."""
    tables = {
        "model": ModelConfig(name="m", dtype="float32", replicas=1),
        "engine": replace(ENGINE, kv_memory="1MiB", host_kv_memory="8MiB", speculation="off"),
    }
    scheduler = SchedulerConfig(preset="fastserve", standby_slots=4)
    with open_system("split", actor_model_dir, tmp_path_factory.mktemp("log"), scheduler, **tables) as system:
        yield system


async def test_orders_go_on_whoever_gives_them(short_of_memory: System, truth: Truth) -> None:
    system = short_of_memory
    scheduler, manager = scheduler_name("0"), kv_offload_manager_name("0")

    async def decided(by: str) -> float:
        return await system.metric(scheduler, DECISIONS, by=by)

    async def more(by: str, than: float) -> None:
        async def risen() -> bool:
            return await decided(by) > than

        await eventually(risen, f"more decisions by the {by}")

    async with calm_client(system) as client:
        async with under_load(client, truth) as load:
            await more("manager", 0)
            alone = await decided("scheduler")
            load.release()
            died = await kill_components(client, (manager,))
            assert died.keys() == {manager}
            await more("scheduler", alone)
            await wait_successors(client, died)
        answered = await decided("manager")
        async with under_load(client, truth) as load:
            load.release()
            await more("manager", answered)
