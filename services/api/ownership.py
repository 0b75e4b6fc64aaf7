"""The owner of a request: the API key that it was sent with, kept only as a salted hash."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping

_SALT_BYTES = 16
_HASH_BYTES = 32


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


def _hash(key: str, salt: bytes) -> bytes:
    return hashlib.blake2b(key.encode(), salt=salt, digest_size=_HASH_BYTES).digest()
