"""Which components there should be, the names of components and actors, and which actor hosts which component."""

from __future__ import annotations

from farsight.core.config.load import FarsightConfig
from farsight.core.messages.status import ComponentCounts

NAMESPACE = "farsight"

RUN_DIR_VARIABLE = "FARSIGHT_RUN_DIR"
"""Environment variable with the directory of a private cluster, set in every process of the cluster."""

ROUTER = "router"
LOG_STORE = "log-store"
STREAM_STORE = "stream-store"
SUPERVISOR = "supervisor"
HOST = "host"
"""Addresses a process as a whole: no component has this name."""

CONTROL = "control"
"""The actor that, except under ``split``, hosts every component whose kind is not listed in ``_ALONE``, or under
``together`` in ``_ALONE_TOGETHER``."""

PACKED_WORKERS = 16
"""Workers of emulated devices that share a process under ``placement = "packed"``."""

BACKENDS = "backends"
"""The actor that, except under ``split``, hosts the backends of all external servers."""

LENGTH_PREDICTOR = "length-predictor"
"""The kind of the LengthPredictors, as ``kind_of`` returns it."""

IMAGE_ENCODER = "image-encoder"
"""The kind of the ImageEncoders, which turn pictures into rows."""

_ALONE_TOGETHER = ("worker", "rank", IMAGE_ENCODER)
_ALONE = (*_ALONE_TOGETHER, LENGTH_PREDICTOR)
_BACKEND = "backend-"


def backend_name(index: int) -> str:
    """Returns the name of a replica that is an external server, and of the component that represents it."""
    return f"{_BACKEND}{index}"


def is_backend(replica: str) -> bool:
    """Returns whether a replica is an external server."""
    return replica.startswith(_BACKEND)


def worker_name(replica: str) -> str:
    return replica if is_backend(replica) else f"worker-{replica}"


def rank_name(replica: str, rank: int) -> str:
    """Returns the name of rank 1, 2 ... of a replica; rank 0 is the replica's worker."""
    return f"rank-{replica}.{rank}"


def rank_of(host: str) -> tuple[str, int] | None:
    """Returns the replica and the rank that a host runs; None if the host is neither worker nor rank."""
    kind, _, index = host.rpartition("-")
    if kind == "worker":
        return index, 0
    replica, _, rank = index.partition(".")
    return (replica, int(rank)) if kind == "rank" else None


def scheduler_name(replica: str) -> str:
    return replica if is_backend(replica) else f"scheduler-{replica}"


def kv_offload_manager_name(replica: str) -> str:
    return f"kv-offload-manager-{replica}"


def kind_of(component: str) -> str:
    """Returns a component's name without its number: ``router``, ``worker``, ``length-predictor``."""
    head, _, index = component.rpartition("-")
    return head if index[:1].isdigit() else component


def length_predictor_name(index: int) -> str:
    return f"{LENGTH_PREDICTOR}-{index}"


def serving_time_estimator_name(index: int) -> str:
    return f"serving-time-estimator-{index}"


def image_encoder_name(index: int) -> str:
    return f"{IMAGE_ENCODER}-{index}"


def replica_of(component: str) -> str:
    """Returns the replica that a component belongs to; empty for components of the whole service."""
    kind, _, index = component.rpartition("-")
    return index if kind in ("worker", "scheduler", "kv-offload-manager") else ""


def host_of(component: str, placement: str) -> str:
    """Returns the name of the actor that hosts a component under ``together``, ``fused``, ``split`` or ``packed``."""
    if placement == "packed" and component.startswith("worker-"):
        return f"workers-{int(component.rpartition('-')[2]) // PACKED_WORKERS}"
    if placement == "split" or component.startswith(_ALONE_TOGETHER if placement == "together" else _ALONE):
        return component
    return BACKENDS if is_backend(component) else CONTROL


def actor_name(host: str) -> str:
    """Returns the name of a host's actor in Ray."""
    return f"farsight-{host}"


SCALABLE = {
    "replica": "replicas",
    "length-predictor": "length_predictors",
    "serving-time-estimator": "serving_time_estimators",
    IMAGE_ENCODER: "image_encoders",
    "ingress": "ingress_replicas",
}
"""Kinds that can be scaled, with their fields of ``ComponentCounts``."""


def initial_counts(config: FarsightConfig, *, sees: bool = False) -> ComponentCounts:
    """Returns the configured numbers. ``ingress_replicas`` is 0 until a number other than Ray Serve's is requested.

    Args:
        sees: Whether the model reads pictures.
    """
    actors = config.actors
    counts = (config.model.replicas, actors.length_predictors, actors.serving_time_estimators)
    return ComponentCounts(
        *counts, ingress_replicas=0, backends=len(config.replica), image_encoders=config.images.encoders if sees else 0
    )


def replica_components(replica: str, num_ranks: int = 1) -> list[str]:
    """Returns the components of one replica; worker and ranks come last, since they take long to start."""
    ranks = [rank_name(replica, rank) for rank in range(1, num_ranks)]
    return [scheduler_name(replica), kv_offload_manager_name(replica), worker_name(replica), *ranks]


def own_replicas(counts: ComponentCounts) -> list[str]:
    """Returns the replicas of Farsight's own engine that should have processes."""
    return [replica for replica in map(str, range(counts.replicas)) if replica not in counts.drained]


def wanted_components(counts: ComponentCounts, num_ranks: int = 1) -> list[str]:
    """Returns every component that should run, except the Supervisor and the ingress replicas.

    Args:
        num_ranks: Ranks of each replica (``DecoderConfig.num_ranks``).
    """
    components = [ROUTER, LOG_STORE, STREAM_STORE]
    components += map(length_predictor_name, range(counts.length_predictors))
    components += map(serving_time_estimator_name, range(counts.serving_time_estimators))
    components += map(image_encoder_name, range(counts.image_encoders))
    for replica in own_replicas(counts):
        components += replica_components(replica, num_ranks)
    components += map(backend_name, range(counts.backends))
    return components


def by_host(components: list[str], placement: str) -> dict[str, list[str]]:
    """Groups components by host, in order."""
    hosts: dict[str, list[str]] = {}
    for component in components:
        hosts.setdefault(host_of(component, placement), []).append(component)
    return hosts
