"""Creating and ending the actors that host components: on which node, with which GPUs.

These actors are detached: they outlive the process that created them, but not the cluster. Replicas spread over the
nodes. All components of a replica are on one node, so that messages are cheap and the loss of a node breaks only its
own replicas. Everything else is on the head, without which there is no cluster anyway.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from farsight.actors.runtime.host import ComponentHost
from farsight.actors.runtime.names import (
    IMAGE_ENCODER,
    SUPERVISOR,
    actor_name,
    host_of,
    rank_of,
    replica_of,
    worker_name,
)
from farsight.actors.runtime.peer import LOOK_AGAIN_S, Site
from farsight.actors.runtime.watching import ClusterStore, watched

_HEAD = "node:__internal_head__"
"""A resource that Ray gives to the head only."""

_HOMES = "homes"
"""Key under which a Supervisor leaves its successor the id of the node of each replica, as JSON."""


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
        self._homes = {} if data is None else json.loads(data)

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
        await self._store.put(_HOMES, json.dumps(self._homes).encode())


_CPU_SHARE = 0.01
"""CPUs in the bundle of a rank without a GPU: a bundle must not be empty, and processors are not counted here."""


def rank_options(host: str, site: Site) -> dict[str, Any]:
    """Returns the options with which Ray creates a host that is one of several ranks; empty for other hosts.

    All ranks of a replica are in one placement group, on one node if a node has room. The group outlives its ranks: a
    rank that is started again finds its place free.
    """
    place = rank_of(host)
    if place is None or site.config.model.num_ranks == 1:
        return {}
    replica, rank = place
    group = _rank_group(replica, site)
    strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=rank)
    return {"num_gpus": site.config.gpus_per_rank, "scheduling_strategy": strategy}


def remove_rank_group(replica: str, site: Site) -> None:
    """Frees the placement group of a replica that is given up."""
    group = _find(replica, site)
    if group is not None:
        remove_placement_group(group)


def _rank_group(replica: str, site: Site) -> Any:
    found = _find(replica, site)
    if found is not None:
        return found
    gpus = site.config.gpus_per_rank
    bundle = {"GPU": gpus} if gpus else {"CPU": _CPU_SHARE}
    return placement_group(
        [bundle] * site.config.model.num_ranks,
        strategy="PACK",
        name=_name(replica, site),
        lifetime="detached" if site.detached else None,
    )


def _find(replica: str, site: Site) -> Any | None:
    try:
        return get_placement_group(_name(replica, site))
    except ValueError:
        return None


def _name(replica: str, site: Site) -> str:
    return f"{site.namespace}-replica-{replica}"


CREATE_TIMEOUT_S = 30.0
"""Seconds within which the name of a dead actor must become free."""


def find_host(host: str, namespace: str) -> Any | None:
    """Returns the handle of a host; None if the host does not live."""
    try:
        return ray.get_actor(actor_name(host), namespace=namespace)
    except ValueError:
        return None


async def until_gone(host: str, namespace: str) -> None:
    """Waits until a host's name is free: a caller that found the dead actor would think that it cannot start."""
    deadline = time.monotonic() + CREATE_TIMEOUT_S
    while find_host(host, namespace) is not None and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(LOOK_AGAIN_S)


def create_host(host: str, site: Site, restarts: int, node_id: str = "", last_end: str = "") -> Any:
    """Creates a host and returns its handle; concurrent callers get the same host.

    Args:
        node_id: Node of the host; empty for the head. If the node is lost meanwhile, every call of the handle raises
            ``ActorUnschedulableError``. One of several ranks lives where its replica's placement group is.
        last_end: Why the host is started again.

    Raises:
        ValueError: The name still belongs to a dead actor; try again.
    """
    # Handles are Any: Ray adds methods at run time that no type describes.
    host_class: Any = ray.remote(ComponentHost)
    placed = {
        "num_gpus": num_gpus(host, site),  # for 0, Ray hides all GPUs from the process
        # Not soft: Ray (2.60) ignores a soft affinity of an actor that needs no resources.
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id or head_node(living_nodes()), soft=False),
    }
    options: Any = host_class.options(
        name=actor_name(host),
        namespace=site.namespace,
        lifetime="detached" if site.detached else None,
        get_if_exists=True,
        num_cpus=0,
        max_restarts=0,
        max_concurrency=1000,
        **placed | rank_options(host, site),
    )
    return options.remote(host, site, restarts, last_end)


def num_gpus(host: str, site: Site) -> int:
    """Returns the number of GPUs that a host needs for itself."""
    if host.startswith(IMAGE_ENCODER):
        return int(site.config.images.device == "cuda")
    return int(site.config.engine.device == "cuda" and host.startswith(worker_name("")))


async def recreate_host(host: str, site: Site, restarts: int, node_id: str = "", last_end: str = "") -> Any:
    """Creates a host as soon as the name of its predecessor is free; arguments as for ``create_host``.

    Raises:
        TimeoutError: The name does not become free within ``CREATE_TIMEOUT_S``.
    """
    async with asyncio.timeout(CREATE_TIMEOUT_S):
        while True:
            try:
                return create_host(host, site, restarts, node_id, last_end)
            except ValueError:
                await asyncio.sleep(LOOK_AGAIN_S)


async def keep_supervisor(site: Site) -> None:
    """Starts the Supervisor if there is none and restarts it when it ends or hangs; never returns.

    Every process that speaks to clients does this, so the Supervisor is only lost if all of these processes are lost.
    """
    host = host_of(SUPERVISOR, site.placement)
    restarts, last_end = 0, ""
    while True:
        handle = find_host(host, site.namespace) or await recreate_host(host, site, restarts, last_end=last_end)
        async with watched(host, handle, site) as watch:
            try:
                await handle.add.remote([SUPERVISOR])
                restarts = await handle.restarts.remote() + 1
                await handle.ended.remote()
            except ray.exceptions.RayActorError:
                last_end = watch.verdict or "its process died"
                await asyncio.sleep(LOOK_AGAIN_S)  # its name may stay with the dead actor for a moment
            except ray.exceptions.RayTaskError as error:
                last_end = str(error.cause)
                ray.kill(handle)  # a component in it has failed: the next turn starts it again


def list_hosts(namespace: str) -> list[str]:
    """Returns the names of all hosts that live."""
    prefix = actor_name("")
    actors = ray.util.list_named_actors(all_namespaces=True)
    mine = [actor["name"] for actor in actors if actor["namespace"] == namespace]
    return [name.removeprefix(prefix) for name in mine if name.startswith(prefix)]
