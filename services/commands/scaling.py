"""The clients of commands that change a running server: they ask it, then wait for slow changes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from actors.runtime.names import SCALABLE
from core.config.load import read_toml
from core.errors import InvalidValueError
from services.commands.ask import ask

ROW_KINDS = {
    "replica": "ModelWorker",
    "length-predictor": "LengthPredictor",
    "serving-time-estimator": "ServingTimeEstimator",
    "image-encoder": "ImageEncoder",
    "ingress": "Ingress",
}
"""The names in ``/status`` of the kinds that can be scaled."""

SCALE_TIMEOUT_S = 900.0
"""Time limit in seconds: a new replica loads its model, a removed one drains."""

INGRESS_TIMEOUT_S = 60.0
STATUS_TIMEOUT_S = 10.0
_LOOK_S = 0.2


def scale_service(url: str, token: str, kind: str, count: int) -> str:
    """Scales and returns one line about it.

    Raises:
        FarsightError: An argument is wrong, the server refuses, or no server answers.
    """
    if kind not in SCALABLE:
        raise InvalidValueError("KIND", kind, f"one of {', '.join(SCALABLE)}")
    began = time.monotonic()
    before = _num_rows(url, token, kind)
    ask(url, "/admin/scale", SCALE_TIMEOUT_S, token, {"kind": kind, "count": count})
    note = "" if kind != "ingress" else _wait_ingress(url, token, count)
    return f"{kind}: {before} -> {count} after {time.monotonic() - began:.1f} s{note}"


def drain_replica(url: str, token: str, replica: str, *, cancel: bool) -> str:
    """Takes a replica out or back, and returns one line about it.

    Raises:
        FarsightError: An argument is wrong, the server refuses, or no server answers.
    """
    began = time.monotonic()
    reply = ask(url, "/admin/drain", SCALE_TIMEOUT_S, token, {"replica": replica, "cancel": cancel})
    state = "drained" if reply["drained"] else "takes requests"
    return f"replica {replica}: {state} after {time.monotonic() - began:.1f} s"


def upgrade_service(
    url: str, token: str, model: str | None, config: Path | None, *, surge: bool, drain_s: float
) -> str:
    """Replaces the weights of a running service, or the settings of its workers, and returns one line about it.

    Raises:
        FarsightError: An argument is wrong, the server refuses, or no server answers.
    """
    if model is None and config is None:
        raise InvalidValueError("--model", "", "a model directory; or --config with a file of settings to change")
    began = time.monotonic()
    body: dict[str, Any] = {"surge": surge, "drain_s": drain_s}
    if model is not None:
        body["model"] = str(Path(model).expanduser().absolute())
    if config is not None:
        body["config"] = read_toml(config)
    reply = ask(url, "/admin/upgrade", SCALE_TIMEOUT_S + drain_s, token, body)
    return f"all replicas run {reply['model']} (version {reply['version']}) after {time.monotonic() - began:.1f} s"


def _wait_ingress(url: str, token: str, count: int) -> str:
    """Waits for ingress replicas, which Ray Serve adds and removes in the background."""
    deadline = time.monotonic() + INGRESS_TIMEOUT_S
    while (found := _num_rows(url, token, "ingress")) < count:
        if time.monotonic() > deadline:
            return f" ({found} running so far)"
        time.sleep(_LOOK_S)
    return " (those removed first finish their streams)" if found > count else ""


def _num_rows(url: str, token: str, kind: str) -> int:
    rows = ask(url, "/status", STATUS_TIMEOUT_S, token)["actors"]
    return sum(row["kind"] == ROW_KINDS[kind] for row in rows)
