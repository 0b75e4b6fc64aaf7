"""Creating and ending the actors that host components. Detached: they outlive whoever created them, but not the
cluster."""

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
"""For the name of a dead actor to come free."""


def find_host(host: str, namespace: str) -> Any | None:
    """Its handle, if it lives."""
    try:
        return ray.get_actor(actor_name(host), namespace=namespace)
    except ValueError:
        return None


async def until_gone(host: str, namespace: str) -> None:
    """Waits until its name is free: who finds the dead actor by it would take it for one that cannot start."""
    deadline = time.monotonic() + CREATE_TIMEOUT_S
    while find_host(host, namespace) is not None and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(LOOK_AGAIN_S)


def create_host(host: str, site: Site, restarts: int, node_id: str = "", last_end: str = "") -> Any:
    """A handle of that host; of two callers at once both get the same one.

    Args:
        node_id: Where it is to live; empty for the head. If that is lost meanwhile, every call of the handle raises
            ``ActorUnschedulableError``. One of several ranks lives where its replica's placement group is.
        last_end: Why it is started again.

    Raises:
        ValueError: the name still belongs to a dead actor; try again.
    """
    # Handles are Any: Ray adds methods at run time that no type describes.
    host_class: Any = ray.remote(ComponentHost)
    placed = {
        "num_gpus": num_gpus(host, site),  # without any, Ray hides them all from the process
        # Not soft: to that Ray pays no heed where an actor needs no resources (2.60).
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
    """GPUs of its own that a host needs."""
    if host.startswith(IMAGE_ENCODER):
        return int(site.config.images.device == "cuda")
    return int(site.config.engine.device == "cuda" and host.startswith(worker_name("")))


async def recreate_host(host: str, site: Site, restarts: int, node_id: str = "", last_end: str = "") -> Any:
    """Creates it as soon as the name of its predecessor is free; the rest as for ``create_host``.

    Raises:
        TimeoutError: it does not come free.
    """
    async with asyncio.timeout(CREATE_TIMEOUT_S):
        while True:
            try:
                return create_host(host, site, restarts, node_id, last_end)
            except ValueError:
                await asyncio.sleep(LOOK_AGAIN_S)


async def keep_supervisor(site: Site) -> None:
    """Sees to it that there is a Supervisor, and that it goes on, which sees to everything else. Never returns.

    Every process that speaks to clients does this, so it takes the loss of all of them to lose the Supervisor too.
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
                await asyncio.sleep(LOOK_AGAIN_S)  # its name may stay with the dead one for a moment
            except ray.exceptions.RayTaskError as error:
                last_end = str(error.cause)
                ray.kill(handle)  # a component in it has failed: it is started again


def list_hosts(namespace: str) -> list[str]:
    """The names of all hosts that live."""
    prefix = actor_name("")
    actors = ray.util.list_named_actors(all_namespaces=True)
    mine = [actor["name"] for actor in actors if actor["namespace"] == namespace]
    return [name.removeprefix(prefix) for name in mine if name.startswith(prefix)]
