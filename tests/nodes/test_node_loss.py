"""A node of the cluster is lost under load: its requests move, and no stream gets another token than without."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.ray_nodes import Nodes
from farsight.actors.runtime.names import replica_components
from farsight.core.messages.status import ComponentStatus
from farsight.services.ingress.engine_client import EngineClient
from tests.actors.local_system import System, Truth, calm_client, eventually, read, rows, under_load

pytestmark = pytest.mark.timeout(900)  # three nodes and a service start

LOSSES: dict[str, Callable[[Nodes, str], None]] = {
    "its raylet is killed": Nodes.remove,
    "all of it at once": Nodes.kill,
}


async def homes(client: EngineClient, nodes: Nodes) -> dict[str, str]:
    """The node of every component that lives; the head is empty."""
    return {row.name: nodes.of(row.pid) for row in (await rows(client)).values() if row.kind != "Ingress"}


def on(node_id: str, found: dict[str, str]) -> set[str]:
    return {name for name, home in found.items() if home == node_id}


@pytest.mark.parametrize("how", LOSSES)
async def test_the_requests_of_a_lost_node_move_and_finish(
    spread_system: System, nodes: Nodes, truth: Truth, how: str
) -> None:
    async with calm_client(spread_system) as client:
        before = await homes(client, nodes)
        assert before["worker-0"] != before["worker-1"]
        replica = "0" if before["worker-0"] else "1"  # the other one may live on the head
        lost, gone = before[f"worker-{replica}"], set(replica_components(replica, 1))
        assert on(lost, before) == gone, "a replica is together on its node, and alone"
        async with under_load(client, truth):
            status = await rows(client)
            LOSSES[how](nodes, lost)
            await eventually(lambda: _are_back(client, status, gone), "the replica lives elsewhere")
        truth.check(3, await read(client, 3, 20), 20)
        after = await homes(client, nodes)
        assert len({after[name] for name in gone}) == 1, "together again"
        assert {name: home for name, home in after.items() if name not in gone}.items() <= before.items()
    nodes.add()


async def _are_back(client: EngineClient, before: dict[str, ComponentStatus], names: set[str]) -> bool:
    now = await rows(client)
    return all(
        now[name].state == "ready"
        and now[name].pid != before[name].pid
        and now[name].restarts == before[name].restarts + 1
        for name in names
    )
