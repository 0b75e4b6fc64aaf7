"""How pieces and actors are called, and which actor hosts which piece."""

from __future__ import annotations

NAMESPACE = "farsight"

ROUTER = "router"
LOG_STORE = "log-store"
SUPERVISOR = "supervisor"
CONTROL = "control"
"""The one actor that hosts every piece of ``placement = "fused"`` that is not listed in ``_ALONE``."""

_ALONE = ("worker", "length-predictor")


def worker_name(replica: str) -> str:
    return f"worker-{replica}"


def scheduler_name(replica: str) -> str:
    return f"scheduler-{replica}"


def kv_offload_manager_name(replica: str) -> str:
    return f"kv-offload-manager-{replica}"


def length_predictor_name(index: int) -> str:
    return f"length-predictor-{index}"


def serving_time_estimator_name(index: int) -> str:
    return f"serving-time-estimator-{index}"


def host_of(piece: str, placement: str) -> str:
    """The name of the actor that hosts a piece under ``fused`` or ``split``."""
    if placement == "split" or piece.startswith(_ALONE):
        return piece
    return CONTROL


def actor_name(host: str) -> str:
    """As Ray knows it."""
    return f"farsight-{host}"
