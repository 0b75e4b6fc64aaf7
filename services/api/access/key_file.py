"""The file of keys: read by ingress replicas, written by ``farsight keys``, never with a key in clear text."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from pathlib import Path
from typing import Any

from farsight.core.errors import FarsightError, InvalidValueError
from farsight.services.api.access.keys import KeyRecord, Role, Tenant

VERSION = 1
MAX_BYTES = 16 * 1024 * 1024
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
NAME_RULE = "1 to 64 letters, digits, '.', '_', '@' or '-', the first a letter or digit"
_COUNTS = ("requests_per_minute", "tokens_per_minute", "max_in_flight")
_PRIORITIES = ("priority_min", "priority_max")
_MAX_COUNT = 10**12


@dataclass(frozen=True, slots=True)
class KeyFile:
    """What the file holds."""

    keys: tuple[KeyRecord, ...] = ()
    tenants: Mapping[str, Tenant] = dataclass_field(default_factory=dict)


def read_key_file(path: Path) -> KeyFile:
    """Reads the file; raises FarsightError if it is missing, open to other users, too large, or something else."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077:
                raise FarsightError(
                    f"{path} may be read or written by other users (mode {stat.S_IMODE(found.st_mode):04o}); "
                    f"expected a file of mode 0600: chmod 600 {path}"
                )
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise FarsightError(f"{path} cannot be read: {error.strerror}; `farsight keys add NAME` writes it") from error
    if len(data) > MAX_BYTES:
        raise FarsightError(f"{path} has more than {MAX_BYTES} bytes, the limit of a key file")
    try:
        return _parse(json.loads(data))
    except InvalidValueError as error:
        raise FarsightError(f"{path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise FarsightError(f"{path} is not a key file: {error}") from error


@contextlib.contextmanager
def changed_key_file(path: Path) -> Iterator[list[KeyFile]]:
    """A list with the file's content; what stands in it in the end replaces the file, under a lock and at once.

    A file that is missing begins empty. Readers see the old file or the new one, never a half of one.

    Raises:
        FarsightError: The file cannot be read or written.
    """
    try:
        lock = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise FarsightError(f"{path} cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        content = [read_key_file(path) if path.exists() else KeyFile()]
        yield content
        _replace(path, content[0])
    finally:
        os.close(lock)


def _replace(path: Path, content: KeyFile) -> None:
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.absolute().parent)  # mode 0600
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump(_written(content), file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        raise FarsightError(f"{path} cannot be written: {error.strerror}") from error


def _written(content: KeyFile) -> dict[str, Any]:
    keys = [
        {
            "id": key.id,
            "name": key.name,
            "tenant": key.tenant,
            "roles": list(key.roles),
            "salt": key.salt.hex(),
            "hmac_sha256": key.digest.hex(),
            "created_at": key.created_at,
        }
        for key in content.keys
    ]
    tenants = {}
    for name, tenant in content.tenants.items():
        values = dataclasses.asdict(tenant)
        tenants[name] = {key: value for key, value in values.items() if key != "name" and value is not None}
    return {"version": VERSION, "tenants": tenants, "keys": keys}


def _parse(value: Any) -> KeyFile:
    table = _table("the file", value, {"version", "tenants", "keys"})
    if table.get("version") != VERSION:
        raise InvalidValueError("version", table.get("version"), str(VERSION))
    tenants_value, keys_value = table.get("tenants", {}), table.get("keys", [])
    if not isinstance(tenants_value, dict):
        raise InvalidValueError("tenants", tenants_value, "an object with an entry for each tenant")
    if not isinstance(keys_value, list):
        raise InvalidValueError("keys", keys_value, "a list of keys")
    tenants = {checked_name("tenants", name): parse_tenant(name, each) for name, each in tenants_value.items()}
    keys = tuple(_parse_key(f"keys[{number}]", each) for number, each in enumerate(keys_value))
    for field, values in (("keys.name", [key.name for key in keys]), ("keys.id", [key.id for key in keys])):
        seen: set[str] = set()
        for value in values:
            if value in seen:
                raise InvalidValueError(field, value, "one that no other key has")
            seen.add(value)
    return KeyFile(keys, tenants)


def parse_tenant(name: str, value: Any) -> Tenant:
    """Makes a tenant from its entry; raises InvalidValueError, which names the limit, if one is wrong."""
    place = f"tenants.{name}"
    table = _table(place, value, {*_COUNTS, *_PRIORITIES, "weight"})
    for key in _COUNTS:
        count = table.get(key, 0)
        if type(count) is not int or not 0 <= count <= _MAX_COUNT:
            raise InvalidValueError(f"{place}.{key}", count, "an integer >= 0; 0 is no limit")
    for key in _PRIORITIES:
        if key in table and type(table[key]) is not int:
            raise InvalidValueError(f"{place}.{key}", table[key], "an integer")
    low, high = table.get("priority_min"), table.get("priority_max")
    if low is not None and high is not None and low > high:
        raise InvalidValueError(f"{place}.priority_min", low, f"at most priority_max = {high}")
    weight = table.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise InvalidValueError(f"{place}.weight", weight, "a number > 0")
    return Tenant(name, **{**table, "weight": float(weight)})


def _parse_key(place: str, value: Any) -> KeyRecord:
    table = _table(place, value, {"id", "name", "tenant", "roles", "salt", "hmac_sha256", "created_at"})
    name = checked_name(f"{place}.name", table.get("name"))
    key_id = table.get("id")
    if not isinstance(key_id, str) or not re.fullmatch(r"[0-9a-f]{12}", key_id):
        raise InvalidValueError(f"{place}.id", key_id, "12 hexadecimal digits")
    roles = table.get("roles")
    if not isinstance(roles, list) or not roles or not all(role in tuple(Role) for role in roles):
        raise InvalidValueError(f"{place}.roles", roles, f"a list of {', '.join(Role)}")
    salt, digest = (_hex(f"{place}.{field}", table.get(field)) for field in ("salt", "hmac_sha256"))
    if len(salt) < 16 or len(digest) != 32:
        raise InvalidValueError(place, name, "a salt of at least 16 bytes and a digest of 32 bytes")
    created_at = table.get("created_at", 0.0)
    if isinstance(created_at, bool) or not isinstance(created_at, int | float):
        raise InvalidValueError(f"{place}.created_at", created_at, "seconds since the epoch")
    tenant = checked_name(f"{place}.tenant", table.get("tenant", name))
    return KeyRecord(key_id, name, tenant, tuple(map(Role, roles)), salt, digest, float(created_at))


def checked_name(field: str, value: Any) -> str:
    """Returns the name of a key or tenant; raises InvalidValueError if it is none."""
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise InvalidValueError(field, value, NAME_RULE)
    return value


def _hex(field: str, value: Any) -> bytes:
    try:
        return bytes.fromhex(value)
    except (TypeError, ValueError):
        raise InvalidValueError(field, "another value", "hexadecimal digits") from None


def _table(place: str, value: Any, known: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidValueError(place, value, "an object")
    for name in value:
        if name not in known:
            raise InvalidValueError(f"{place}.{name}", value[name], f"one of {', '.join(sorted(known))}")
    return value
