"""Which components there should be, and in which hosts."""

from __future__ import annotations

from actors.runtime.names import (
    LOG_STORE,
    ROUTER,
    backend_name,
    host_of,
    kv_offload_manager_name,
    length_predictor_name,
    rank_name,
    scheduler_name,
    serving_time_estimator_name,
    worker_name,
)
from actors.runtime.peer import PeerBook, PeerLost
from core.config.load import FarsightConfig
from core.messages.status import ComponentCounts

SCALABLE = {
    "replica": "replicas",
    "length-predictor": "length_predictors",
    "serving-time-estimator": "serving_time_estimators",
    "ingress": "ingress_replicas",
}
"""What can be scaled, and its field of ``ComponentCounts``."""


def initial_counts(config: FarsightConfig) -> ComponentCounts:
    """As configured. ``ingress_replicas`` is 0 until another number is asked for than Ray Serve was given."""
    actors = config.actors
    counts = (config.model.replicas, actors.length_predictors, actors.serving_time_estimators)
    return ComponentCounts(*counts, ingress_replicas=0, backends=len(config.replica))


def replica_components(replica: str, num_ranks: int = 1) -> list[str]:
    """The components of one replica; the ranks of its model last, since they are what takes long to start."""
    ranks = [rank_name(replica, rank) for rank in range(1, num_ranks)]
    return [scheduler_name(replica), kv_offload_manager_name(replica), worker_name(replica), *ranks]


async def current_counts(peers: PeerBook, known: ComponentCounts) -> ComponentCounts:
    """What the Supervisor says now; while there is none, what was known before."""
    try:
        return await peers.supervisor().counts()
    except PeerLost:
        return known


def wanted_components(counts: ComponentCounts, num_ranks: int = 1) -> list[str]:
    """Every component but the Supervisor and the ingress replicas.

    Args:
        num_ranks: Ranks of each replica (``ModelConfig.num_ranks``).
    """
    components = [ROUTER, LOG_STORE]
    components += map(length_predictor_name, range(counts.length_predictors))
    components += map(serving_time_estimator_name, range(counts.serving_time_estimators))
    for index in range(counts.replicas):
        components += replica_components(str(index), num_ranks)
    components += map(backend_name, range(counts.backends))
    return components


def by_host(components: list[str], placement: str) -> dict[str, list[str]]:
    """The components of each host, in their order."""
    hosts: dict[str, list[str]] = {}
    for component in components:
        hosts.setdefault(host_of(component, placement), []).append(component)
    return hosts
