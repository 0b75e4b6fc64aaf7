"""HTTP requests to a running server, for commands that send one and end."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from core.errors import FarsightError


def ask(server: str, path: str, timeout_s: float, token: str = "", body: dict[str, Any] | None = None) -> Any:
    """The JSON answer to a GET, or to a POST if there is a body.

    Args:
        server: Its address, as ``http://127.0.0.1:8000``.
        token: Bearer token; empty for none.

    Raises:
        FarsightError: The server refused, with its own message; or no server answers, and why.
    """
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server + path, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        raise FarsightError(_refusal(error)) from error
    except (OSError, ValueError) as error:
        raise FarsightError(f"no Farsight server answers at {server}: {_reason(error)}") from error


def _refusal(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return str(error)


def _reason(error: OSError | ValueError) -> str:
    """The operating system's message without urllib's wrapper."""
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    return (reason.strerror if isinstance(reason, OSError) else None) or str(reason)
