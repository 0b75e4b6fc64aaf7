"""HTTP requests to a running server, for commands that send one and end."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.parse
import urllib.request
from typing import Annotated, Any

import typer

from farsight.core.errors import FarsightError
from farsight.services.run_file import find_admin_token, find_tls_cert

KEY_VARIABLE = "FARSIGHT_API_KEY"

MAX_ANSWER_BYTES = 256 << 20
"""Most of an answer that is read; explanations of a long log take some MiB."""

ApiKeyOption = Annotated[
    str | None,
    typer.Option(envvar=KEY_VARIABLE, help="API key; default: the admin token of a server of this user here."),
]


JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def key_for(url: str, api_key: str | None) -> str:
    """Returns the key to send: the given one, else the admin token of a server of this user here; else empty."""
    if api_key is not None:
        return api_key
    parts = urllib.parse.urlsplit(url)
    return find_admin_token(parts.port or _DEFAULT_PORTS.get(parts.scheme, 0), parts.hostname or "")


_DEFAULT_PORTS = {"http": 80, "https": 443}


def ask(server: str, path: str, timeout_s: float, token: str = "", body: dict[str, Any] | None = None) -> Any:
    """Returns the JSON answer to a GET, or to a POST if there is a body; arguments and errors as of ``read``."""
    data = read(server, path, timeout_s, token, body)
    try:
        return json.loads(data)
    except ValueError as error:
        raise FarsightError(f"no server answers at {server}: {error}") from error


def read(server: str, path: str, timeout_s: float, token: str = "", body: dict[str, Any] | None = None) -> bytes:
    """Returns the answer to a GET, or to a POST if there is a body.

    Redirects are not followed: the key is for one server.

    Args:
        server: Its address, as ``http://127.0.0.1:8000``.
        token: Bearer token; empty for none.

    Raises:
        FarsightError: The server refused, with its own message; or no server answers, and why.
    """
    try:
        with open_answer(server, path, timeout_s, token, body) as reply:
            return _bounded(reply)
    except TimeoutError as error:
        raise FarsightError(f"no server answers at {server} within {timeout_s:g} s; it may be busy") from error
    except (OSError, ValueError) as error:
        raise FarsightError(f"no server answers at {server}: {_reason(error)}") from error


def open_answer(server: str, path: str, timeout_s: float, token: str = "", body: dict[str, Any] | None = None) -> Any:
    """Returns the open answer, to be read line by line and closed; arguments as of ``read``.

    Raises:
        FarsightError: The server refused, with its own message.
        OSError, ValueError: No server answers.
    """
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server + path, data, headers)
    try:
        return _opener(server).open(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        raise FarsightError(_refusal(error)) from error


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **fields: Any) -> None:
        return None


def _opener(server: str) -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_NoRedirect, urllib.request.HTTPSHandler(context=_tls_context(server)))


def _bounded(reply: Any) -> bytes:
    body: bytes = reply.read(MAX_ANSWER_BYTES + 1)
    if len(body) > MAX_ANSWER_BYTES:
        raise ValueError(f"the answer has more than {MAX_ANSWER_BYTES} bytes")
    return body


def _tls_context(server: str) -> ssl.SSLContext | None:
    """Trusts the certificate of a local server, whatever name it is for; others by the system's authorities."""
    parts = urllib.parse.urlsplit(server)
    if parts.scheme != "https":
        return None
    certificate = find_tls_cert(parts.port or _DEFAULT_PORTS["https"], parts.hostname or "")
    context = ssl.create_default_context(cafile=certificate or None)
    if certificate:
        context.check_hostname = False  # The certificate names the server's public name; its file is the run file's.
    return context


def _refusal(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return str(error)


def _reason(error: OSError | ValueError) -> str:
    """The operating system's message without urllib's wrapper."""
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    return (reason.strerror if isinstance(reason, OSError) else None) or str(reason)
