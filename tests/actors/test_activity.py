"""What the components of a real service tell of what they did, and what the Supervisor keeps of it."""

from __future__ import annotations

import asyncio
import contextlib

from farsight.core.decisions import unpack_decisions
from farsight.core.errors import FarsightError
from farsight.core.messages.series import ComponentsQuery, ComponentsReply, SeriesQuery
from farsight.services.ingress.engine_client import EngineClient
from tests.actors.local_system import System, calm_client, eventually, kill, read, ready_rows
from tests.actors.test_deaths import FUSED

DONE = {
    "Router": "requests placed",
    "Scheduler": "requests ended",
    "ModelWorker": "steps",
    "ServingTimeEstimator": "step samples",
    "LogStore": "records written",
    "KVOffloadManager": "messages",
    "LengthPredictor": "messages",
    "StreamStore": "messages",
    "Supervisor": "messages",
}
"""For each kind something that it has counted once requests have run."""


async def told(client: EngineClient, kind: str) -> ComponentsReply:
    """Returns what the Supervisor tells; on a busy machine it may be asked in vain."""
    found: list[ComponentsReply] = []

    async def answered() -> bool:
        with contextlib.suppress(FarsightError):
            found.append(await client.overview.supervisor.component_series(ComponentsQuery(kind, SeriesQuery())))
        return bool(found)

    await eventually(answered, "the Supervisor tells of its components")
    return found[0]


async def has_done(client: EngineClient, kind: str, name: str) -> bool:
    """Whether a component of the kind has a line of that name, which is above 0 where requests cause it."""
    found = [line for row in (await told(client, kind)).lines.rows for line in row.columns if line.name == name]
    return any(max(filter(None, line.values), default=0.0) > 0 or kind == "StreamStore" for line in found)


async def is_seen_whole(client: EngineClient) -> bool:
    """Whether the status for pages names the same components, in the same processes, as the status of now."""
    seen, now = await client.overview.last_status(), await client.overview.status()
    key = [
        sorted((row.name, row.kind, row.pid, row.state, row.restarts) for row in each.components)
        for each in (seen, now)
    ]
    return key[0] == key[1] and seen.kv.num_blocks == now.kv.num_blocks


@FUSED
async def test_every_kind_tells_what_it_has_done(system: System) -> None:
    async with calm_client(system) as client:
        await ready_rows(client)

        async def all_done() -> bool:
            await asyncio.gather(*(read(client, index, 40) for index in range(4)))
            return all([await has_done(client, kind, name) for kind, name in DONE.items()])

        await eventually(all_done, "every kind has a line")
        for kind in (
            "Router",
            "ServingTimeEstimator",
            "LogStore",
        ):  # a Scheduler notes named requests alone
            decided = await client.overview.recent_decisions(kind)
            assert any(unpack_decisions(each.decisions) for each in decided), kind
        await eventually(lambda: is_seen_whole(client), "the Supervisor tells of the service what the processes tell")
        loads = await client.overview.supervisor.replica_series(SeriesQuery())
        assert {row.name for row in loads.rows} == {"0", "1"}
        assert {line.name for line in loads.rows[0].columns} == {"requests", "work_tokens", "waiting", "kv_used"}
        assert (await told(client, "<script>")).lines.rows == ()


@FUSED
async def test_a_death_is_kept_with_its_reason(system: System) -> None:
    async with calm_client(system) as client:
        pid = (await ready_rows(client))["worker-1"].pid

        async def is_watched() -> bool:
            rows = (await told(client, "ModelWorker")).lines.rows
            return "worker-1" in {row.name for row in rows}

        await eventually(is_watched, "the Supervisor knows the worker")
        kill({pid})

        async def is_noted() -> bool:
            events = (await told(client, "ModelWorker")).events
            return any((each.name, each.state) == ("worker-1", "restarted") and each.reason for each in events)

        await eventually(is_noted, "the restart is noted")
        await ready_rows(client)
        await eventually(lambda: is_seen_whole(client), "the status for pages has the new process")
