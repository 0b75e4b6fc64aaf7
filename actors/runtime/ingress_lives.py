"""Which ingress replicas have died. Ray knows which processes have ended; silence proves nothing: a busy replica may be
silent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable

from core.errors import FarsightError

logger = logging.getLogger(__name__)

Gone = Callable[[Collection[str]], Awaitable[frozenset[str]]]
"""Takes ingress replicas that are silent at the moment; returns the ones whose processes have ended."""


async def all_gone(ingress_ids: Collection[str]) -> frozenset[str]:
    """Replaces ``gone_ingresses`` in a process without Ray, where each client that is silent has been closed."""
    return frozenset(ingress_ids)


async def gone_ingresses(ingress_ids: Collection[str]) -> frozenset[str]:
    """Returns the ingress replicas that Ray has no living actor for; none while Ray cannot be asked."""
    if not ingress_ids:
        return frozenset()
    try:
        return without_actor(ingress_ids, await asyncio.to_thread(_actor_names))
    except Exception:
        logger.warning("Ray could not be asked which ingress replicas live; none counts as dead", exc_info=True)
        return frozenset()


def without_actor(ingress_ids: Iterable[str], actor_names: Iterable[str]) -> frozenset[str]:
    """Returns the ids without a living actor: Ray Serve ends the name of a replica's actor with ``#`` and the id."""
    living = {name.rpartition("#")[2] for name in actor_names}
    return frozenset(ingress_ids) - living


def _actor_names() -> list[str]:
    import ray  # not at the top: Ray reads its settings at import

    if not ray.is_initialized():  # else the call would start Ray
        raise FarsightError("this process is not connected to Ray")
    return [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
