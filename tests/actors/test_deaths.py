"""Components die and come and go under load: no stream gets another token than without."""

from __future__ import annotations

import asyncio

import pytest

from actors.runtime.names import SUPERVISOR
from core.messages.status import ComponentStatus, Scale
from services.ingress.engine_client import EngineClient
from tests.actors.local_system import (
    NUM_TOKENS,
    System,
    Truth,
    calm_client,
    eventually,
    kill,
    patient_rows,
    read,
    ready_rows,
    rows,
    under_load,
)

KINDS = (
    "router",
    "scheduler-0",
    "worker-1",
    "kv-offload-manager-0",
    "length-predictor-0",
    "serving-time-estimator-0",
    "log-store",
    "supervisor",
)

SPLIT_DEATHS = [
    *((name,) for name in KINDS),
    ("worker-0", "worker-1"),
    ("router", "scheduler-0", "worker-0"),
    ("scheduler-1", "worker-1", "supervisor"),
    ("worker-0", "scheduler-0", "kv-offload-manager-0"),  # what they did moves to the other replica
]
FUSED_DEATHS = [
    ("router",),  # and all others that live in the same process
    ("worker-0",),
    ("length-predictor-0",),
    ("worker-0", "worker-1"),
    ("router", "worker-0", "worker-1"),
]


FUSED = pytest.mark.parametrize("system", ["fused"], indirect=True)
"""For what no placement changes."""


async def kill_components(client: EngineClient, names: tuple[str, ...]) -> dict[str, ComponentStatus]:
    """Kills their processes at once; returns the status before. In it are all components that died with them."""
    before = await ready_rows(client)
    pids = {before[name].pid for name in names}
    kill(pids)
    return {name: row for name, row in before.items() if row.pid in pids}


async def wait_dead(client: EngineClient, names: set[str]) -> None:
    """Until all of them have been shown as dead, not necessarily at once."""
    left = set(names)

    async def shown() -> bool:
        left.difference_update(row.name for row in (await rows(client)).values() if row.state == "dead")
        return not left

    await eventually(shown, f"shown dead: {left}")


async def wait_successors(client: EngineClient, died: dict[str, ComponentStatus]) -> None:
    """Until each is ready in another process, and has been counted."""
    status: dict[str, ComponentStatus] = {}

    async def ready() -> bool:
        status.update(await rows(client))
        return all(status[name].state == "ready" and status[name].pid != row.pid for name, row in died.items())

    await eventually(ready, f"ready again: {set(died)}")
    for name, row in died.items():
        assert status[name].restarts == row.restarts + 1


async def assert_unnoticed(system: System, truth: Truth, names: tuple[str, ...]) -> None:
    """They die under load, are shown as dead and then ready again, and no stream is another one."""
    async with calm_client(system) as client:
        async with under_load(client, truth) as load:
            died = await kill_components(client, names)
            load.release()
            assert died.keys() >= set(names)
            await asyncio.gather(wait_dead(client, set(died)), wait_successors(client, died))
        truth.check(3, await read(client, 3, 20), 20)


@pytest.mark.parametrize("names", FUSED_DEATHS, ids=" and ".join)
async def test_no_stream_notices_a_death_in_the_fused_placement(
    fused_system: System, truth: Truth, names: tuple[str, ...]
) -> None:
    await assert_unnoticed(fused_system, truth, names)


@pytest.mark.parametrize("names", SPLIT_DEATHS, ids=" and ".join)
async def test_no_stream_notices_a_death_in_the_split_placement(
    split_system: System, truth: Truth, names: tuple[str, ...]
) -> None:
    await assert_unnoticed(split_system, truth, names)


async def test_a_new_supervisor_starts_who_dies_later(system: System, client: EngineClient, truth: Truth) -> None:
    await wait_successors(client, await kill_components(client, (SUPERVISOR,)))
    async with under_load(client, truth) as load:
        died = await kill_components(client, ("worker-1",))
        load.release()
        await wait_successors(client, died)


@FUSED
async def test_a_resumed_stream_says_so_in_the_log(system: System, client: EngineClient, truth: Truth) -> None:
    async with under_load(client, truth) as load:
        died = await kill_components(client, ("worker-0", "worker-1"))
    for record in await system.log(*(reading.request_id for reading in load.readings)):
        assert record.attempts >= 2
        assert record.finish_reason == "length"
        assert record.output_len == NUM_TOKENS
    await wait_successors(client, died)


async def test_replicas_are_taken_away_and_added_under_load(system: System, client: EngineClient, truth: Truth) -> None:
    async with under_load(client, truth) as load:
        load.release()
        assert (await client.overview.supervisor.scale(Scale("replica", 1))).replicas == 1
    status = await patient_rows(client)
    assert {name for name, row in status.items() if row.kind == "ModelWorker"} == {"worker-0"}
    async with under_load(client, truth) as load:
        load.release()
        assert (await client.overview.supervisor.scale(Scale("replica", 2))).replicas == 2
    status = await patient_rows(client)
    assert {name for name, row in status.items() if row.kind == "ModelWorker"} == {"worker-0", "worker-1"}


@FUSED
@pytest.mark.parametrize("kind", ["length-predictor", "serving-time-estimator"])
async def test_learners_are_added_and_taken_away_under_load(
    system: System, client: EngineClient, truth: Truth, kind: str
) -> None:
    async with under_load(client, truth) as load:
        load.release()
        for count in (2, 3, 1):
            await client.overview.supervisor.scale(Scale(kind, count))
            found = {name for name in await patient_rows(client) if name.startswith(kind)}
            assert found == {f"{kind}-{index}" for index in range(count)}
