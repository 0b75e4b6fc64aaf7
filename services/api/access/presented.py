"""What a request says about itself: its key, its host, its client's address.

The owner of a request is the key that it was sent with, kept only as a salted hash.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping

from starlette.types import Scope

_SALT_BYTES = 16
_HASH_BYTES = 32

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


def bearer_key(header: str | None) -> str:
    """The key in an ``Authorization`` header; empty if there is none."""
    scheme, _, key = (header or "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def sent_key(headers: Mapping[str, str]) -> str:
    """The key of a request where no keys are in use: of ``Authorization``, else of ``x-api-key``; empty for none."""
    return bearer_key(headers.get("authorization")) or headers.get("x-api-key", "").strip()


def owner_of(key: str) -> bytes:
    """The stored form of a key: a fresh salt and the hash; empty bytes for an empty key."""
    if not key:
        return b""
    salt = secrets.token_bytes(_SALT_BYTES)
    return salt + _hash(key, salt)


def owns(key: str, owner: bytes) -> bool:
    """Whether the owner is this key. Anyone who knows the id may read a request that was sent without a key."""
    if not owner:
        return True
    return hmac.compare_digest(_hash(key, owner[:_SALT_BYTES]), owner[_SALT_BYTES:])


def salt_of(key: str, cache_salt: str) -> str:
    """A cache salt that only requests of one key share; no ``cache_salt`` makes it equal to another key's.

    The salt does not reveal a key that cannot be guessed.
    """
    digest = hashlib.blake2b(key.encode(), digest_size=_SALT_BYTES, person=b"cache salt").hexdigest() if key else ""
    return f"{digest}\0{cache_salt}"


def own_salt(headers: Mapping[str, str], cache_salt: str, shares_across_keys: bool) -> str:
    """The cache salt that a request runs with."""
    return cache_salt if shares_across_keys else salt_of(sent_key(headers), cache_salt)


def _hash(key: str, salt: bytes) -> bytes:
    return hashlib.blake2b(key.encode(), salt=salt, digest_size=_HASH_BYTES).digest()
