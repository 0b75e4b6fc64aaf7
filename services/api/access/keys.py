"""API keys: how they look, how a request presents one, how they are kept, and whose they are.

A key is ``fsk-ID-SECRET``. The ID finds the record; the secret has 256 random bits, so that one HMAC-SHA256 with the
record's salt is enough to keep it: a slow password hash only protects secrets that can be guessed, and would take
milliseconds of every request. The owner of a request is the key that it was sent with, kept only as a salted hash.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from starlette.types import Scope

from farsight.core.request import FLEX, is_flex

PREFIX = "fsk"
MAX_KEY_LEN = 512
"""Bytes; a longer key is refused without a hash."""

_ID_BYTES = 6
_SECRET_BYTES = 32
_SALT_BYTES = 16


class Role(StrEnum):
    """What a key allows. ``ADMIN`` includes the other two."""

    SERVE = "serve"
    OBSERVE = "observe"
    ADMIN = "admin"


ALL_ROLES = frozenset(Role)


@dataclass(frozen=True, slots=True)
class Tenant:
    """Limits of a tenant; 0 is no limit.

    Attributes:
        max_in_flight: Requests in flight at once.
        priority_min, priority_max: Range of the field ``priority``; a value outside moves to the nearer end.
        weight: Share of the device time relative to other tenants, for fair orders (``policies.tenancy``).
    """

    name: str
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_in_flight: int = 0
    priority_min: int | None = None
    priority_max: int | None = None
    weight: float = 1.0

    def priority(self, wanted: int) -> int:
        """The wanted priority, moved into the tenant's range; what takes what is left keeps to that."""
        if is_flex(wanted):
            return FLEX + self.priority(wanted - FLEX)
        if self.priority_min is not None:
            wanted = max(wanted, self.priority_min)
        return wanted if self.priority_max is None else min(wanted, self.priority_max)


@dataclass(frozen=True, slots=True)
class Caller:
    """The holder of a key.

    Attributes:
        name: Name of the key.
        roles: With what ``ADMIN`` includes.
    """

    name: str
    tenant: Tenant
    roles: frozenset[Role]

    @property
    def identity(self) -> str:
        """What stands for the tenant in owners and salts; no header can hold it, since it begins with NUL."""
        return f"\0tenant\0{self.tenant.name}"


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """The stored form of a key.

    Attributes:
        id: Public part of the key; empty for a key of the operator's own making.
        created_at: Unix seconds.
    """

    id: str
    name: str
    tenant: str
    roles: tuple[Role, ...]
    salt: bytes = field(repr=False)
    digest: bytes = field(repr=False)
    created_at: float = 0.0

    def matches(self, key: bytes) -> bool:
        return hmac.compare_digest(key_digest(key, self.salt), self.digest)


def key_digest(key: bytes, salt: bytes) -> bytes:
    """32 bytes."""
    return hmac.digest(salt, key, hashlib.sha256)


def record_of(
    key: str, name: str, tenant: str, roles: Iterable[Role], key_id: str = "", created_at: float = 0.0
) -> KeyRecord:
    """Makes the stored form of a key, with a fresh salt."""
    salt = secrets.token_bytes(_SALT_BYTES)
    return KeyRecord(key_id, name, tenant, tuple(roles), salt, key_digest(key.encode(), salt), created_at)


def make_key(name: str, tenant: str, roles: Iterable[Role], created_at: float) -> tuple[str, KeyRecord]:
    """Makes a new random key and its stored form."""
    key_id = secrets.token_hex(_ID_BYTES)
    key = f"{PREFIX}-{key_id}-{secrets.token_urlsafe(_SECRET_BYTES)}"
    return key, record_of(key, name, tenant, roles, key_id, created_at)


_NO_RECORD = KeyRecord("", "", "", (), secrets.token_bytes(_SALT_BYTES), bytes(32))


class KeyRing:
    """All keys that open this server.

    Args:
        records: Keys with an id are found by it; the others are compared one by one, so there are few.
        tenants: Limits by name; a tenant without an entry has none.
    """

    def __init__(self, records: Iterable[KeyRecord] = (), tenants: Mapping[str, Tenant] | None = None) -> None:
        known = dict(tenants or {})
        self._by_id: dict[bytes, KeyRecord] = {}
        self._without_id: list[KeyRecord] = []
        self._callers: dict[KeyRecord, Caller] = {}
        for record in records:
            if record.id:
                self._by_id[record.id.encode()] = record
            else:
                self._without_id.append(record)
            tenant = known.setdefault(record.tenant, Tenant(record.tenant))
            self._callers[record] = Caller(record.name, tenant, _with_included(record.roles))

    def __len__(self) -> int:
        return len(self._callers)

    @property
    def tenants(self) -> frozenset[str]:
        """Names of the tenants that have a key."""
        return frozenset(each.tenant.name for each in self._callers.values())

    def tenant(self, name: str) -> Tenant | None:
        """Returns the tenant of that name, if a key belongs to it."""
        return next((each.tenant for each in self._callers.values() if each.tenant.name == name), None)

    def find(self, key: bytes) -> Caller | None:
        """Returns the caller whose key it is. An unknown id costs one hash as a known one does."""
        if not key or len(key) > MAX_KEY_LEN:
            return None
        prefix, _, rest = key.partition(b"-")
        if prefix == PREFIX.encode():
            record = self._by_id.get(rest.partition(b"-")[0], _NO_RECORD)
            if record.matches(key) and record is not _NO_RECORD:
                return self._callers[record]
        for record in self._without_id:
            if record.matches(key):
                return self._callers[record]
        return None


def _with_included(roles: Iterable[Role]) -> frozenset[Role]:
    found = frozenset(roles)
    return ALL_ROLES if Role.ADMIN in found else found


CURRENT: ContextVar[Caller | None] = ContextVar("farsight_caller", default=None)
"""Set for the task that serves a request, and so for the tasks that it starts; None where no keys are in use."""

SCOPE_KEY = "farsight.caller"


def is_admin(scope: Mapping[str, Any]) -> bool:
    """Tells whether the request carries a key with the role ``admin``."""
    caller: Caller | None = scope.get(SCOPE_KEY)
    return caller is not None and Role.ADMIN in caller.roles


def may_observe() -> bool:
    """Tells whether the caller may know how the server is set up: an operator, or anyone where no keys are in use."""
    caller = CURRENT.get()
    return caller is None or not caller.roles.isdisjoint((Role.OBSERVE, Role.ADMIN))


def tenant_name() -> str:
    """Returns the tenant whose files, batches and responses the caller sees; empty, for all, without keys."""
    caller = CURRENT.get()
    return "" if caller is None else caller.tenant.name


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
