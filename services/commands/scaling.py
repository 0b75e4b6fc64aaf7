"""The clients of commands that change a running server: they ask it, then wait for slow changes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farsight.actors.runtime.names import SCALABLE
from farsight.core.config.load import read_toml
from farsight.core.errors import InvalidValueError
from farsight.services.commands.ask import ask

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


@dataclass(frozen=True, slots=True)
class ServerChange:
    """What has changed on a running server.

    Attributes:
        line: For people.
        result: For programs; times in seconds.
    """

    line: str
    result: dict[str, Any]


def scale_service(url: str, token: str, kind: str, count: int) -> ServerChange:
    """Scales the components of a kind.

    Raises:
        FarsightError: An argument is wrong, the server refuses, or no server answers.
    """
    if kind not in SCALABLE:
        raise InvalidValueError("KIND", kind, f"one of {', '.join(SCALABLE)}")
    began = time.monotonic()
    before = _num_rows(url, token, kind)
    ask(url, "/admin/scale", SCALE_TIMEOUT_S, token, {"kind": kind, "count": count})
    note = "" if kind != "ingress" else _wait_ingress(url, token, count)
    seconds = time.monotonic() - began
    result = {"kind": kind, "before": before, "count": count, "seconds": seconds}
    return ServerChange(f"{kind}: {before} -> {count} after {seconds:.1f} s{note}", result)


def drain_replica(url: str, token: str, replica: str, *, cancel: bool) -> ServerChange:
    """Takes a replica out or back.

    Raises:
        FarsightError: An argument is wrong, the server refuses, or no server answers.
    """
    began = time.monotonic()
    reply = ask(url, "/admin/drain", SCALE_TIMEOUT_S, token, {"replica": replica, "cancel": cancel})
    state = "drained" if reply["drained"] else "takes requests"
    seconds = time.monotonic() - began
    result = {"replica": replica, "drained": bool(reply["drained"]), "seconds": seconds}
    return ServerChange(f"replica {replica}: {state} after {seconds:.1f} s", result)


def upgrade_service(
    url: str, token: str, model: str | None, config: Path | None, *, surge: bool, drain_s: float
) -> ServerChange:
    """Replaces the weights of a running service, or the settings of its workers.

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
    seconds = time.monotonic() - began
    result = {"model": reply["model"], "version": reply["version"], "seconds": seconds}
    return ServerChange(f"all replicas run {reply['model']} (version {reply['version']}) after {seconds:.1f} s", result)


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
