"""How components and actors are called, and which actor hosts which component."""

from __future__ import annotations

NAMESPACE = "farsight"

RUN_DIR_VARIABLE = "FARSIGHT_RUN_DIR"
"""In the environment of every process of a private cluster: its directory."""

ROUTER = "router"
LOG_STORE = "log-store"
SUPERVISOR = "supervisor"
CONTROL = "control"
"""The one actor that hosts every component of ``placement = "fused"``, or "packed", that is not listed in
``_ALONE``."""

PACKED_WORKERS = 16
"""Workers of emulated devices that share a process under ``placement = "packed"``."""

BACKENDS = "backends"
"""The one that under ``fused`` talks to all other servers."""

_ALONE = ("worker", "rank", "length-predictor")
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


def length_predictor_name(index: int) -> str:
    return f"length-predictor-{index}"


def serving_time_estimator_name(index: int) -> str:
    return f"serving-time-estimator-{index}"


def replica_of(component: str) -> str:
    """The replica that a component belongs to; empty for components of the whole service."""
    kind, _, index = component.rpartition("-")
    return index if kind in ("worker", "scheduler", "kv-offload-manager") else ""


def host_of(component: str, placement: str) -> str:
    """The name of the actor that hosts a component under ``fused``, ``split`` or ``packed``."""
    if placement == "packed" and component.startswith("worker-"):
        return f"workers-{int(component.rpartition('-')[2]) // PACKED_WORKERS}"
    if placement == "split" or component.startswith(_ALONE):
        return component
    return BACKENDS if is_backend(component) else CONTROL


def actor_name(host: str) -> str:
    """As Ray knows it."""
    return f"farsight-{host}"
