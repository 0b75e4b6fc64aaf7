"""The command line's side of ``farsight scale``: asks the running server, then waits for what takes longer."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from typing import Any

from actors.layout import SCALABLE
from core.errors import FarsightError, InvalidValueError

ROW_KINDS = {
    "replica": "ModelWorker",
    "length-predictor": "LengthPredictor",
    "serving-time-estimator": "ServingTimeEstimator",
    "ingress": "Ingress",
}
"""How ``/status`` calls what can be scaled."""

SCALE_TIMEOUT_S = 900.0
"""A new replica loads its model; a removed one drains."""

INGRESS_TIMEOUT_S = 60.0
STATUS_TIMEOUT_S = 10.0
_LOOK_S = 0.2


def scale_service(url: str, token: str, kind: str, count: int) -> str:
    """Scales and returns one line about it.

    Raises:
        FarsightError: a wrong argument, a server that refuses, or none that answers.
    """
    if kind not in SCALABLE:
        raise InvalidValueError("KIND", kind, f"one of {', '.join(SCALABLE)}")
    began = time.monotonic()
    before = _num_rows(url, kind)
    _request(f"{url}/admin/scale", SCALE_TIMEOUT_S, token, {"kind": kind, "count": count})
    note = "" if kind != "ingress" else _wait_ingress(url, count)
    return f"{kind}: {before} -> {count} after {time.monotonic() - began:.1f} s{note}"


def _wait_ingress(url: str, count: int) -> str:
    """Ray Serve adds and removes ingress replicas on its own time."""
    deadline = time.monotonic() + INGRESS_TIMEOUT_S
    while (found := _num_rows(url, "ingress")) < count:
        if time.monotonic() > deadline:
            return f" ({found} are there so far)"
        time.sleep(_LOOK_S)
    return " (those removed first finish their streams)" if found > count else ""


def _num_rows(url: str, kind: str) -> int:
    rows = _request(f"{url}/status", STATUS_TIMEOUT_S)["actors"]
    return sum(row["kind"] == ROW_KINDS[kind] for row in rows)


def _request(url: str, timeout_s: float, token: str = "", body: dict[str, Any] | None = None) -> Any:
    """The JSON answer to a GET, or to a POST if there is a body."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=timeout_s) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        raise FarsightError(_refusal(error)) from error
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise FarsightError(f"no Farsight server answers at {url}: {error}") from error


def _refusal(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return str(error)
