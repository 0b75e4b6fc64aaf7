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


def salt_of(key: str, cache_salt: str) -> str:
    """What is shared by the requests of one key only; another key's cannot be made with any ``cache_salt``.

    The key does not follow from it, as far as keys cannot be guessed.
    """
    digest = hashlib.blake2b(key.encode(), digest_size=_SALT_BYTES, person=b"cache salt").hexdigest() if key else ""
    return f"{digest}\0{cache_salt}"


def _hash(key: str, salt: bytes) -> bytes:
    return hashlib.blake2b(key.encode(), salt=salt, digest_size=_HASH_BYTES).digest()
