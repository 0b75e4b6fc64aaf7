"""What Ray sets aside for the processes that compute: GPUs, and for a replica of several ranks a placement group."""

from __future__ import annotations

from typing import Any

from ray.util import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.runtime.names import rank_of
from actors.runtime.peer import Site

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
