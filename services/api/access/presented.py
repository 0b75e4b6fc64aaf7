"""What a request says about itself: its key, its host, its client's address."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import Scope

CLIENT_HEADER = b"x-farsight-client"
"""HAProxy sets it to the client's address and drops what the client sent under this name."""

Headers = Iterable[tuple[bytes, bytes]]


class ConflictingKeys(Exception):
    """The headers hold several keys that are not the same."""


def presented_key(headers: Headers) -> bytes:
    """The key in ``Authorization: Bearer`` or ``x-api-key``; empty if there is none.

    Raises:
        ConflictingKeys: Another program between client and server may read another key than this one.
    """
    found = b""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            key = key.strip() if scheme.lower() == b"bearer" else b""
        elif name == b"x-api-key":
            key = value.strip()
        else:
            continue
        if key and found and key != found:
            raise ConflictingKeys
        found = key or found
    return found


def host_of(headers: Headers) -> str | None:
    """The name in the ``Host`` header, in lower case and without its port; None if there is not exactly one."""
    values = [value for name, value in headers if name == b"host"]
    if len(values) != 1:
        return None
    host = values[0].decode("latin-1").strip().lower()
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0].removesuffix(".")


def client_address(scope: Scope, *, behind_haproxy: bool) -> str:
    """The address of the client.

    Args:
        behind_haproxy: Whether our own HAProxy is in front, so that its header may be believed.
    """
    if behind_haproxy:
        for name, value in scope["headers"]:
            if name == CLIENT_HEADER:
                return str(value.decode("latin-1"))
    client = scope.get("client")
    return str(client[0]) if client else ""
