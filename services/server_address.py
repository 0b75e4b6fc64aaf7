"""How commands name the running server that they ask."""

from __future__ import annotations

import urllib.parse
from typing import Annotated

import typer

from farsight.core.errors import InvalidValueError
from farsight.services.run_file import find_tls_cert

PortOption = Annotated[int, typer.Option(min=1, max=65535, help="Port of the running server.")]
HostOption = Annotated[
    str,
    typer.Option(help="Address of the running server; https://NAME if it speaks TLS and is on another machine."),
]
UrlOption = Annotated[
    str | None,
    typer.Option(help="Address of the server, as http://127.0.0.1:8000; in place of --host and --port."),
]


def address_of(url: str | None, host: str, port: int) -> str:
    """The address of the server that a command means.

    Raises:
        InvalidValueError: ``url`` is no address.
    """
    if url is None:
        return server_url(host, port)
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidValueError("--url", url, "an address as http://127.0.0.1:8000")
    return url.rstrip("/")


def server_url(host: str, port: int) -> str:
    """The address of a server: with TLS if the host says so, or if the run file of a local server does."""
    scheme, _, name = host.rpartition("://")
    if not scheme:
        scheme = "https" if find_tls_cert(port, name) else "http"
    return f"{scheme}://{f'[{name}]' if ':' in name and name[0] != '[' else name}:{port}"
