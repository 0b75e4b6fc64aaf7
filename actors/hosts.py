"""Creating and ending the actors that host pieces. Detached: they outlive whoever created them, but not the cluster."""

from __future__ import annotations

import asyncio
from typing import Any

import ray

from actors.host import PieceHost
from actors.names import SUPERVISOR, actor_name, host_of
from actors.peer import LOOK_AGAIN_S
from actors.site import Site

CREATE_TIMEOUT_S = 30.0
"""For the name of a dead actor to come free."""


def find_host(host: str, namespace: str) -> Any | None:
    """Its handle, if it lives."""
    try:
        return ray.get_actor(actor_name(host), namespace=namespace)
    except ValueError:
        return None


def create_host(host: str, site: Site, restarts: int) -> Any:
    """A handle of that host; of two callers at once both get the same one.

    Raises:
        ValueError: the name still belongs to a dead actor; try again.
    """
    # Handles are Any: Ray adds methods at run time that no type describes.
    host_class: Any = ray.remote(PieceHost)
    options: Any = host_class.options(
        name=actor_name(host),
        namespace=site.namespace,
        lifetime="detached" if site.detached else None,
        get_if_exists=True,
        num_cpus=0,
        max_restarts=0,
        max_concurrency=1000,
    )
    return options.remote(host, site, restarts)


async def recreate_host(host: str, site: Site, restarts: int) -> Any:
    """Creates it as soon as the name of its predecessor is free.

    Raises:
        TimeoutError: it does not come free.
    """
    async with asyncio.timeout(CREATE_TIMEOUT_S):
        while True:
            try:
                return create_host(host, site, restarts)
            except ValueError:
                await asyncio.sleep(LOOK_AGAIN_S)


async def keep_supervisor(site: Site) -> None:
    """Sees to it that there is a Supervisor, which sees to everything else. Never returns.

    Every process that speaks to clients does this, so it takes the loss of all of them to lose the Supervisor too.
    """
    host = host_of(SUPERVISOR, site.placement)
    restarts = 0
    while True:
        handle = find_host(host, site.namespace) or await recreate_host(host, site, restarts)
        try:
            await handle.add.remote([SUPERVISOR])
            restarts = await handle.restarts.remote() + 1
            await handle.ended.remote()
        except ray.exceptions.RayActorError:
            await asyncio.sleep(LOOK_AGAIN_S)  # its name may stay with the dead one for a moment
        except ray.exceptions.RayTaskError:
            ray.kill(handle)  # a piece in it has failed: it starts anew


def list_hosts(namespace: str) -> list[str]:
    """The names of all hosts that live."""
    prefix = actor_name("")
    actors = ray.util.list_named_actors(all_namespaces=True)
    mine = [actor["name"] for actor in actors if actor["namespace"] == namespace]
    return [name.removeprefix(prefix) for name in mine if name.startswith(prefix)]
