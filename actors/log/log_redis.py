"""The log on a Redis server that syncs every write."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit, urlunsplit

import msgpack
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from farsight.actors.log import log_redis_scripts
from farsight.actors.log.kept_redis import KeptRedis
from farsight.actors.log.log_backend import (
    MAX_INT,
    RECORD_KINDS,
    Record,
    Retention,
    trace_range,
    values,
    version_refused,
    version_unknown,
)
from farsight.core.errors import ConfigError
from farsight.core.messages.log import (
    Artefact,
    ArtefactInfo,
    BatchPage,
    ExamplePage,
    FinishedBatch,
    FinishedRequest,
    ForecastRecord,
    LoggedExample,
    LogPage,
    LogQuery,
    RequestTrace,
)

logger = logging.getLogger(__name__)

REDIS_SCHEMA_VERSION = 1
"""Stored under ``farsight:version``; raised when the form of the other keys changes."""

PREFIX = "farsight:"
"""Prefix of every key."""

CONNECT_S = 5.0
ANSWER_S = 30.0
"""Longest waits in seconds for a connection and for an answer."""

_REQUIRED = {"appendonly": "yes", "appendfsync": "always", "no-appendfsync-on-rewrite": "no"}
"""Required settings of the server: without them an answer does not mean that the write is on disk."""

T = TypeVar("T")

_STREAMS = [PREFIX + name for name in RECORD_KINDS.values()]
_ROWS = [f"{stream}:rows" for stream in _STREAMS]
_FORECASTS, _REQUESTS, _BATCHES, _TRACES = _STREAMS
_EXAMPLES = PREFIX + "examples"
_LAST = PREFIX + "last-rows"
_TRACE_IDS = f"{_TRACES}:ids"
_RECORD_KEYS = [*_STREAMS, *_ROWS, _EXAMPLES, f"{_EXAMPLES}:rows", _LAST, _TRACE_IDS]

_INFO = PREFIX + "artefacts"
_DATA = PREFIX + "artefacts:data"
_CURRENT = PREFIX + "artefacts:current"
_LAST_VERSION = PREFIX + "artefacts:last"
_VERSION = PREFIX + "version"


class UntrustworthyServerError(RedisError):
    """The server may lose acknowledged writes, or holds a log of another version."""


class RedisLog:
    """The log in one database of a Redis server; several stores may write to it at once.

    Every operation is one script: other clients and the server's append-only file see all of it or nothing. Each new
    connection first checks that the server syncs that file before it answers, does not evict the log's keys, and holds
    a log of this version; otherwise the connection is refused and nothing is written.

    Args:
        url: ``redis://`` or ``rediss://``, with the number of the database behind the host.
        patient: ``open`` accepts a server that cannot be reached; the first operations then report it.
    """

    errors: tuple[type[Exception], ...] = (RedisError, OSError)

    def __init__(self, url: str, retention: Retention, patient: bool = False) -> None:
        self._url = url
        self._retention = retention
        self._patient = patient
        try:
            # No retries here: the sender repeats the message, which its ids make harmless.
            self._redis = redis.asyncio.Redis.from_url(
                url,
                redis_connect_func=_greet,
                retry=Retry(NoBackoff(), 0),
                socket_connect_timeout=CONNECT_S,
                socket_timeout=ANSWER_S,
                protocol=2,
            )
        except (ValueError, TypeError) as error:
            raise ConfigError("log.path", without_password(url), f"the URL of a Redis server ({error})") from error
        self._write = self._redis.register_script(log_redis_scripts.WRITE)
        self._read = self._redis.register_script(log_redis_scripts.READ)
        self._read_examples = self._redis.register_script(log_redis_scripts.READ_EXAMPLES)
        self._read_traces = self._redis.register_script(log_redis_scripts.READ_TRACES)
        self._put = self._redis.register_script(log_redis_scripts.PUT)
        self._set_current = self._redis.register_script(log_redis_scripts.SET_CURRENT)
        self._get_artefact = self._redis.register_script(log_redis_scripts.GET_ARTEFACT)
        self.kept = KeptRedis(self._redis)

    async def open(self) -> None:
        try:
            await cast(Awaitable[bool], self._redis.ping())
        except self.errors as error:
            absent = isinstance(error, RedisConnectionError | RedisTimeoutError | OSError)
            if absent and self._patient:
                logger.warning("the Redis server of the log does not answer yet: %s", error)
                return
            await self.close()
            shown = without_password(self._url)
            raise ConfigError("log.path", shown, f"a Redis server that can keep the log ({error})") from error

    async def close(self) -> None:
        await self._redis.aclose()

    async def write(self, records: Sequence[Record]) -> dict[str, int]:
        counts: list[int] = []
        items: list[Any] = []
        for kind in RECORD_KINDS:
            rows = [values(record) for record in records if type(record) is kind]
            counts.append(len(rows))
            for row in rows:
                items += (row[0], msgpack.packb(row))
        num_new = await self._write(_RECORD_KEYS, [self._retention.max_rows, *counts, *items])
        return dict(zip(RECORD_KINDS.values(), num_new, strict=True))

    async def read_requests(self, query: LogQuery) -> LogPage:
        return LogPage(*await self._page(_REQUESTS, FinishedRequest, query))

    async def read_batches(self, query: LogQuery) -> BatchPage:
        return BatchPage(*await self._page(_BATCHES, FinishedBatch, query))

    async def read_examples(self, query: LogQuery) -> ExamplePage:
        keys = [_FORECASTS, _REQUESTS, f"{_FORECASTS}:rows", f"{_REQUESTS}:rows", _EXAMPLES, _LAST]
        found, written = await self._read_examples(keys, _after(query))
        examples = tuple(
            LoggedExample(_unpack(FinishedRequest, finished), _unpack(ForecastRecord, forecast))
            for _, finished, forecast in found
        )
        return ExamplePage(_last_row(found, written, query), examples)

    async def read_traces(self, response_id: str) -> tuple[RequestTrace, ...]:
        first, end = trace_range(response_id)
        found = await self._read_traces([_TRACES, f"{_TRACES}:rows", _TRACE_IDS], [f"[{first}", f"({end}"])
        return tuple(_unpack(RequestTrace, data) for data in found)

    async def put_artefact(self, artefact: Artefact) -> bool:
        kind, version, *info, data = values(artefact)
        keys = [_versions(kind), _INFO, _DATA, _CURRENT, _LAST_VERSION]
        arguments = [kind, version, msgpack.packb([*info, len(data)]), data, self._retention.max_artefacts]
        outcome, last_version = await self._put(keys, arguments)
        if outcome < 0:
            raise version_refused(version, int(last_version))
        return bool(outcome)

    async def set_current(self, kind: str, version: int) -> None:
        keys = [_versions(kind), _INFO, _DATA, _CURRENT]
        if not await self._set_current(keys, [kind, version, self._retention.max_artefacts]):
            raise version_unknown(kind, version)

    async def artefact(self, kind: str, version: int | None) -> Artefact | None:
        found = await self._get_artefact([_INFO, _DATA, _CURRENT], [kind] if version is None else [kind, version])
        if found is None:
            return None
        stored_version, info, data = found
        created_at, score, num_examples, note, _ = msgpack.unpackb(info)
        return Artefact(kind, int(stored_version), created_at, score, num_examples, note, data)

    async def artefacts(self) -> tuple[ArtefactInfo, ...]:
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.hgetall(_INFO)
            pipeline.hgetall(_CURRENT)
            infos, current = await pipeline.execute()
        found = []
        for field, info in infos.items():
            kind, _, version = field.rpartition(b":")
            known = (kind.decode(), int(version), *msgpack.unpackb(info), current.get(kind) == version)
            found.append(ArtefactInfo(*known))
        return tuple(sorted(found, key=lambda each: (each.kind, each.version)))

    async def num_bytes(self) -> None:
        """Returns None: a server reports the size of one key or of all its databases, not of a log."""

    async def _page(self, stream: str, kind: Callable[..., T], query: LogQuery) -> tuple[int, tuple[T, ...]]:
        found, written = await self._read([stream, _LAST], _after(query))
        return _last_row(found, written, query), tuple(_unpack(kind, entry[1][3]) for entry in found)


def without_password(url: str) -> str:
    """Removes the password and the query from a URL, so that it can be shown."""
    parts = urlsplit(url)
    _, at, host = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"***@{host}" if at else host, query=""))


async def _greet(connection: Any) -> None:
    """Checks the server at the beginning of every new connection.

    Raises:
        UntrustworthyServerError: The server must not be trusted with a log.
    """
    await connection.on_connect()
    for setting, expected in _REQUIRED.items():
        value = await _setting(connection, setting)
        if value != expected:
            raise UntrustworthyServerError(
                f"its setting {setting} is {value!r}, expected {expected!r}: it may lose acknowledged writes"
            )
    policy = await _setting(connection, "maxmemory-policy")
    if policy.startswith("allkeys") and await _setting(connection, "maxmemory") != "0":
        raise UntrustworthyServerError(f"its maxmemory-policy is {policy!r}: it drops records when memory is short")
    version = int(await _ask(connection, "GET", _VERSION) or 0)
    if not version:  # a new log, unless another store creates it first
        await _ask(connection, "SET", _VERSION, REDIS_SCHEMA_VERSION, "NX")
        version = int(await _ask(connection, "GET", _VERSION))
    if version != REDIS_SCHEMA_VERSION:
        raise UntrustworthyServerError(f"it has a log of version {version}, expected version {REDIS_SCHEMA_VERSION}")


async def _setting(connection: Any, name: str) -> str:
    try:
        answer = await _ask(connection, "CONFIG", "GET", name)
    except ResponseError as error:
        raise UntrustworthyServerError(f"its setting {name} cannot be read: {error}") from error
    return answer[1].decode() if answer else ""


async def _ask(connection: Any, *command: Any) -> Any:
    await connection.send_command(*command)
    return await connection.read_response()


def _versions(kind: str) -> str:
    return f"{_INFO}:of:{kind}"


def _after(query: LogQuery) -> list[int]:
    return [min(max(query.after_row, 0), MAX_INT), query.limit]


def _last_row(found: list[Any], written: bytes, query: LogQuery) -> int:
    """Returns the last row of a page; the first half of a stream entry's id is the row."""
    return int(found[-1][0].partition(b"-")[0]) if found else min(query.after_row, int(written))


def _unpack(kind: Callable[..., T], data: bytes) -> T:
    return kind(*msgpack.unpackb(data, use_list=False))
