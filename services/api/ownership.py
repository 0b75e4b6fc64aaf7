"""Whose a request is: of the key that it was sent with, of which nothing is kept but a salted hash."""

from __future__ import annotations

import hashlib
import hmac
import secrets

_SALT_BYTES = 16
_HASH_BYTES = 32


def bearer_key(header: str | None) -> str:
    """The key in an ``Authorization`` header; empty if there is none."""
    scheme, _, key = (header or "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def owner_of(key: str) -> bytes:
    """What is kept of a key: a salt of its own and the hash; nothing of no key."""
    if not key:
        return b""
    salt = secrets.token_bytes(_SALT_BYTES)
    return salt + _hash(key, salt)


def owns(key: str, owner: bytes) -> bool:
    """Whether it was sent with this key. What was sent without one belongs to whoever knows its id."""
    if not owner:
        return True
    return hmac.compare_digest(_hash(key, owner[:_SALT_BYTES]), owner[_SALT_BYTES:])


def _hash(key: str, salt: bytes) -> bytes:
    return hashlib.blake2b(key.encode(), salt=salt, digest_size=_HASH_BYTES).digest()
