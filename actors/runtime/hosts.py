"""Creating and ending the actors that host components. These actors are detached: they outlive the process that created
them, but not the cluster."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.runtime.host import ComponentHost
from actors.runtime.names import IMAGE_ENCODER, SUPERVISOR, actor_name, host_of, worker_name
from actors.runtime.nodes import head_node, living_nodes
from actors.runtime.peer import LOOK_AGAIN_S, Site
from actors.runtime.rank_groups import rank_options
from actors.runtime.watching import watched

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
