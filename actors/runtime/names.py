"""Which components there should be, how they and their actors are called, and which actor hosts which component."""

from __future__ import annotations

from core.config.load import FarsightConfig
from core.messages.status import ComponentCounts

NAMESPACE = "farsight"

RUN_DIR_VARIABLE = "FARSIGHT_RUN_DIR"
"""In the environment of every process of a private cluster: its directory."""

ROUTER = "router"
LOG_STORE = "log-store"
STREAM_STORE = "stream-store"
SUPERVISOR = "supervisor"
HOST = "host"
"""Who answers for a process as a whole: no component has this name."""

CONTROL = "control"
"""The one actor that hosts every component of ``placement = "fused"``, "together" or "packed", that is not listed in
``_ALONE``, or ``_ALONE_TOGETHER``."""

PACKED_WORKERS = 16
"""Workers of emulated devices that share a process under ``placement = "packed"``."""

BACKENDS = "backends"
"""The one that, unless they are ``split``, talks to all other servers."""

LENGTH_PREDICTOR = "length-predictor"
"""The kind, as ``kind_of`` names it."""

IMAGE_ENCODER = "image-encoder"
"""The kind of those that turn pictures into rows."""

_ALONE_TOGETHER = ("worker", "rank", IMAGE_ENCODER)
_ALONE = (*_ALONE_TOGETHER, LENGTH_PREDICTOR)
_BACKEND = "backend-"


def backend_name(index: int) -> str:
    """Of a replica that is another server, and of the one piece that stands for its scheduler and its worker."""
    return f"{_BACKEND}{index}"


def is_backend(replica: str) -> bool:
    """Whether that replica is another server."""
    return replica.startswith(_BACKEND)


def worker_name(replica: str) -> str:
    return replica if is_backend(replica) else f"worker-{replica}"


def rank_name(replica: str, rank: int) -> str:
    """Of ranks 1, 2 ... of a replica; rank 0 is its worker."""
    return f"rank-{replica}.{rank}"


def rank_of(host: str) -> tuple[str, int] | None:
    """The replica and the rank that a host is; None if it computes nothing."""
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
    """Its name without its number: ``router``, ``worker``, ``length-predictor``."""
    head, _, index = component.rpartition("-")
    return head if index[:1].isdigit() else component


def length_predictor_name(index: int) -> str:
    return f"{LENGTH_PREDICTOR}-{index}"


def serving_time_estimator_name(index: int) -> str:
    return f"serving-time-estimator-{index}"


def image_encoder_name(index: int) -> str:
    return f"{IMAGE_ENCODER}-{index}"


def replica_of(component: str) -> str:
    """The replica that a component belongs to; empty for components of the whole service."""
    kind, _, index = component.rpartition("-")
    return index if kind in ("worker", "scheduler", "kv-offload-manager") else ""


def host_of(component: str, placement: str) -> str:
    """The name of the actor that hosts a component under ``together``, ``fused``, ``split`` or ``packed``."""
    if placement == "packed" and component.startswith("worker-"):
        return f"workers-{int(component.rpartition('-')[2]) // PACKED_WORKERS}"
    if placement == "split" or component.startswith(_ALONE_TOGETHER if placement == "together" else _ALONE):
        return component
    return BACKENDS if is_backend(component) else CONTROL


def actor_name(host: str) -> str:
    """As Ray knows it."""
    return f"farsight-{host}"


SCALABLE = {
    "replica": "replicas",
    "length-predictor": "length_predictors",
    "serving-time-estimator": "serving_time_estimators",
    IMAGE_ENCODER: "image_encoders",
    "ingress": "ingress_replicas",
}
"""What can be scaled, and its field of ``ComponentCounts``."""


def initial_counts(config: FarsightConfig, *, sees: bool = False) -> ComponentCounts:
    """As configured. ``ingress_replicas`` is 0 until another number is asked for than Ray Serve was given.

    Args:
        sees: Whether the model reads pictures.
    """
    actors = config.actors
    counts = (config.model.replicas, actors.length_predictors, actors.serving_time_estimators)
    return ComponentCounts(
        *counts, ingress_replicas=0, backends=len(config.replica), image_encoders=config.images.encoders if sees else 0
    )


def replica_components(replica: str, num_ranks: int = 1) -> list[str]:
    """The components of one replica; the ranks of its model last, since they are what takes long to start."""
    ranks = [rank_name(replica, rank) for rank in range(1, num_ranks)]
    return [scheduler_name(replica), kv_offload_manager_name(replica), worker_name(replica), *ranks]


def own_replicas(counts: ComponentCounts) -> list[str]:
    """The replicas of our own engine that should have processes."""
    return [replica for replica in map(str, range(counts.replicas)) if replica not in counts.drained]


def wanted_components(counts: ComponentCounts, num_ranks: int = 1) -> list[str]:
    """Every component but the Supervisor and the ingress replicas.

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
    """The components of each host, in their order."""
    hosts: dict[str, list[str]] = {}
    for component in components:
        hosts.setdefault(host_of(component, placement), []).append(component)
    return hosts
