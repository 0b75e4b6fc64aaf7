"""On which node of the cluster a host is created.

Replicas spread over the nodes. All components of a replica are on one node, so that messages are cheap and the
loss of a node breaks only its own replicas. Everything else is on the head, without which there is no cluster anyway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from actors.runtime.cluster_store import ClusterStore
from actors.runtime.names import replica_of
from core.codec import decode, encode

_HEAD = "node:__internal_head__"
"""A resource that Ray gives to the head only."""

_HOMES = "homes"
"""Key of the stored ``ReplicaHomes``."""


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A node that lives.

    Attributes:
        computes: Whether Ray has any CPU or GPU there. A head that is to do nothing else is started without.
        num_gpus: GPUs that Ray has there, used and free.
    """

    node_id: str
    is_head: bool
    computes: bool
    num_gpus: int = 0


def living_nodes() -> list[ClusterNode]:
    """Returns the living nodes of this process's cluster."""
    found = []
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    for node in nodes:
        if node["Alive"]:
            resources = node["Resources"]
            computes = any(resources.get(kind) for kind in ("CPU", "GPU"))
            found.append(ClusterNode(node["NodeID"], _HEAD in resources, computes, int(resources.get("GPU", 0))))
    return found


def head_node(nodes: Sequence[ClusterNode]) -> str:
    """Returns the id of the head; empty if the head is not among the nodes."""
    return next((node.node_id for node in nodes if node.is_head), "")


def choose_node(replica: str, homes: Mapping[str, str], nodes: Sequence[ClusterNode], *, on_gpu: bool = False) -> str:
    """Returns the id of the node that a replica is to live on.

    The replica's home as long as that node lives, else the node that is home to the fewest replicas; among equal nodes
    one that is not the head.

    Args:
        homes: Node ids by replica, as chosen before.
        nodes: All living nodes.
        on_gpu: Whether each replica needs a GPU of its own; nodes with a GPU left are then preferred.
    """
    if homes.get(replica) in {node.node_id for node in nodes}:
        return homes[replica]
    taken = Counter(home for other, home in homes.items() if other != replica)
    able = [node for node in nodes if node.computes] or nodes
    if on_gpu:
        able = [node for node in able if node.num_gpus > taken[node.node_id]] or able
    return min(able, key=lambda node: (taken[node.node_id], node.is_head, node.node_id)).node_id


@dataclass(frozen=True, slots=True)
class ReplicaHomes:
    """What a Supervisor leaves to its successor: pairs of a replica and the id of the node it was started on."""

    homes: tuple[tuple[str, str], ...]


class Homes:
    """Which node each replica lives on. Kept in the cluster, as several lives of the Supervisor may start components of
    one replica.

    Args:
        store: A store that outlives this process.
        on_gpu: Whether each replica needs a GPU.
    """

    def __init__(self, store: ClusterStore, *, on_gpu: bool) -> None:
        self._store = store
        self._on_gpu = on_gpu
        self._homes: dict[str, str] = {}

    async def load(self) -> None:
        """Loads the homes that an earlier Supervisor has chosen."""
        data = await self._store.get(_HOMES)
        self._homes = {} if data is None else dict(decode(data, ReplicaHomes).homes)

    async def of(self, host: str) -> str:
        """Returns the id of the node on which a host is to be created; empty for the head."""
        replica = replica_of(host)
        if not replica:
            return ""
        home = choose_node(replica, self._homes, living_nodes(), on_gpu=self._on_gpu)
        if self._homes.get(replica) != home:
            self._homes[replica] = home
            await self._save()
        return home

    async def forget(self, replica: str) -> None:
        """Drops a replica that will not come back."""
        self._homes.pop(replica, None)
        await self._save()

    async def _save(self) -> None:
        await self._store.put(_HOMES, encode(ReplicaHomes(tuple(self._homes.items()))))
