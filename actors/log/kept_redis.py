"""Kept objects on the Redis server of the log. Every operation is one script, so that all of it happens or nothing.

A hash holds the objects under ``kind:id``. A sorted set for each kind and owner has the ids by time of creation, and
one sorted set has all objects that expire. A hash for each object holds its parts; a hash counts the bytes of owners.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack

from farsight.actors.log.log_backend import within
from farsight.core.kept import (
    AddParts,
    KeptObject,
    ObjectName,
    ObjectPart,
    ObjectQuery,
    PartsQuery,
    PutObject,
    PutVerdict,
)

_PREFIX = "farsight:kept:"
_OBJECTS, _BYTES, _EXPIRY = _PREFIX + "objects", _PREFIX + "bytes", _PREFIX + "expiry"
_KEYS = [_OBJECTS, _BYTES, _EXPIRY]

_REMOVE = """
local objects, bytes, expiry = unpack(KEYS)
local prefix = 'farsight:kept:'
local function remove(name)
    local data = redis.call('HGET', objects, name)
    if not data then
        return 0
    end
    local old = cmsgpack.unpack(data)
    redis.call('HDEL', objects, name)
    redis.call('HINCRBY', bytes, old[3], -old[7])
    redis.call('ZREM', expiry, name)
    redis.call('ZREM', prefix .. 'of:' .. old[1] .. ':' .. old[3], old[2])
    redis.call('DEL', prefix .. 'parts:' .. name)
    return 1
end
"""

_PUT = """
local objects, bytes, expiry = unpack(KEYS)
local name, data, most = ARGV[1], ARGV[2], tonumber(ARGV[3])
local new = cmsgpack.unpack(data)
local found = redis.call('HGET', objects, name)
local revision, had = 0, 0
if found then
    local old = cmsgpack.unpack(found)
    revision, had = old[6], old[7]
end
local has = tonumber(redis.call('HGET', bytes, new[3]) or '0')
local will_have = has + new[7] - had
if new[6] ~= revision + 1 or (most > 0 and will_have > most and will_have > has) then
    return {0, revision, has}
end
redis.call('HSET', objects, name, data)
redis.call('HINCRBY', bytes, new[3], new[7] - had)
redis.call('ZADD', 'farsight:kept:of:' .. new[1] .. ':' .. new[3], ARGV[4], new[2])
if new[5] > 0 then
    redis.call('ZADD', expiry, ARGV[5], name)
else
    redis.call('ZREM', expiry, name)
end
return {1, new[6], will_have}
"""

_DROP = _REMOVE + "return remove(ARGV[1])"

_DROP_EXPIRED = (
    _REMOVE
    + """
for _, name in ipairs(redis.call('ZRANGEBYSCORE', expiry, '-inf', ARGV[1])) do
    remove(name)
end
"""
)

_LIST = """
local objects, ids = KEYS[1], KEYS[2]
local first = 0
local rank, range = 'ZRANK', 'ZRANGE'
if ARGV[2] == '1' then
    rank, range = 'ZREVRANK', 'ZREVRANGE'
end
if ARGV[3] ~= '' then
    local at = redis.call(rank, ids, ARGV[3])
    if not at then
        return {}
    end
    first = at + 1
end
local found = {}
for i, id in ipairs(redis.call(range, ids, first, first + tonumber(ARGV[4]) - 1)) do
    found[i] = redis.call('HGET', objects, ARGV[1] .. ':' .. id)
end
return found
"""

_ADD_PARTS = """
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1 then
    for i = 2, #ARGV, 2 do
        redis.call('HSETNX', KEYS[2], ARGV[i], ARGV[i + 1])
    end
end
"""

_PAGE_PARTS = 64


class KeptRedis:
    """
    Args:
        server: The client of the log's database.
    """

    def __init__(self, server: Any) -> None:
        self._redis = server
        self._put = server.register_script(_PUT)
        self._drop = server.register_script(_DROP)
        self._drop_expired = server.register_script(_DROP_EXPIRED)
        self._list = server.register_script(_LIST)
        self._add_parts = server.register_script(_ADD_PARTS)

    async def put(self, order: PutObject) -> PutVerdict:
        kept = order.kept
        data = msgpack.packb(dataclasses.astuple(kept), use_bin_type=False)  # all that the server's Lua can read
        name = f"{kept.kind}:{kept.object_id}"
        found = await self._put(_KEYS, [name, data, order.max_owner_bytes, kept.created_at, kept.expires_at])
        stored, revision, owner_bytes = map(int, found)
        return PutVerdict(bool(stored), revision, owner_bytes)

    async def find(self, name: ObjectName) -> KeptObject | None:
        data = await self._redis.hget(_OBJECTS, f"{name.kind}:{name.object_id}")
        return None if data is None else _object(data)

    async def list(self, query: ObjectQuery) -> tuple[KeptObject, ...]:
        keys = [_OBJECTS, f"{_PREFIX}of:{query.kind}:{query.owner}"]
        found = await self._list(keys, [query.kind, int(query.newest_first), query.after, query.limit])
        return tuple(map(_object, found))

    async def drop(self, name: ObjectName) -> bool:
        return bool(await self._drop(_KEYS, [f"{name.kind}:{name.object_id}"]))

    async def add_parts(self, order: AddParts) -> None:
        name = f"{order.kind}:{order.object_id}"
        flat = [value for part in order.parts for value in (part.index, part.data)]
        await self._add_parts([_OBJECTS, f"{_PREFIX}parts:{name}"], [name, *flat])

    async def parts(self, query: PartsQuery) -> tuple[ObjectPart, ...]:
        key = f"{_PREFIX}parts:{query.kind}:{query.object_id}"
        indices = sorted(index for index in map(int, await self._redis.hkeys(key)) if index >= query.first)
        if query.only_indices:
            return tuple(ObjectPart(index, b"") for index in indices)
        chosen = indices[:_PAGE_PARTS]
        if not chosen:
            return ()
        data = await self._redis.hmget(key, chosen)
        return within([(i, each) for i, each in zip(chosen, data, strict=True) if each is not None], query.max_bytes)

    async def drop_expired(self, now: float) -> None:
        await self._drop_expired(_KEYS, [now])


def _object(data: bytes) -> KeptObject:
    kind, object_id, owner, *rest = msgpack.unpackb(data, raw=True)
    return KeptObject(kind.decode(), object_id.decode(), owner.decode(), *rest)
