"""The traffic in a log: arrivals, lengths, forecasts and measured latencies of the requests."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from farsight.actors.log.log_backend import LogBackend, Retention
from farsight.actors.log.log_sqlite_schema import APPLICATION_ID, SQL_SCHEMA_VERSION
from farsight.core.errors import ConfigError
from farsight.core.forecast import Forecast
from farsight.core.messages.log import FinishedRequest, LogQuery

if TYPE_CHECKING:
    from farsight.simulator.traffic.workload import SimRequest

PAGE = 5000


@dataclass(frozen=True, slots=True)
class Logged:
    """One request and its forecast."""

    request: FinishedRequest
    forecast: Forecast | None


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests in order of arrival.

    Attributes:
        num_left_out: Number of requests without output or with an error, whose output length is unknown.
    """

    logged: Sequence[Logged]
    num_left_out: int

    def arrivals(self) -> list[SimRequest]:
        """Arrivals for the simulator, from instant 0 on. A forecast counts as known at its request's arrival."""
        from farsight.simulator.counterfactual import as_arrival

        begin = min((each.request.received_at for each in self.logged), default=0.0)
        return [as_arrival(each.request, begin, each.forecast) for each in self.logged]


def read_traffic(path: str) -> Traffic:
    """Reads a whole log; a server may write it at the same time.

    Args:
        path: SQLite file, or ``redis://`` URL.

    Raises:
        ConfigError: There is no log, or it is empty.
    """
    rows = _read_redis(path) if path.startswith(("redis://", "rediss://")) else _read_sqlite(Path(path))
    from farsight.simulator.counterfactual import is_known

    kept = [each for each in rows if is_known(each.request)]
    if not kept:
        found = f"{len(rows)} requests, none of them with an output" if rows else "no finished requests"
        raise ConfigError("LOG", path, f"a log with traffic; this one has {found}")
    kept.sort(key=lambda each: each.request.received_at)
    return Traffic(kept, len(rows) - len(kept))


@contextmanager
def opened_log(path: Path, argument: str = "LOG") -> Iterator[tuple[sqlite3.Connection, int]]:
    """A log file, read only, and the version of its schema.

    Args:
        argument: Names the path in errors.

    Raises:
        ConfigError: There is no such file, or it is no log that can be read.
    """
    if not path.is_file():
        expected = "the file that [log] path names, or a redis:// URL; there is no such file"
        raise ConfigError(argument, str(path), expected)
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            (application_id,) = connection.execute("PRAGMA application_id").fetchone()
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if application_id != APPLICATION_ID or not 1 <= version <= SQL_SCHEMA_VERSION:
                raise ConfigError(argument, str(path), f"a log of Farsight of version {SQL_SCHEMA_VERSION} or earlier")
            yield connection, version
    except sqlite3.Error as error:
        raise ConfigError(argument, str(path), f"a log of Farsight ({error})") from error


def _read_sqlite(path: Path) -> list[Logged]:
    with opened_log(path) as (connection, version):
        columns = _REQUEST if version > 4 else _REQUEST[:-2]  # without priority and tenant
        requests = [FinishedRequest(*row) for row in connection.execute(_select(columns, "finished_requests"))]
        rows = connection.execute(_select(_FORECAST, "forecasts")) if version > 1 else ()
        forecasts = {row[0]: _forecast(row[1], json.loads(row[2]), *row[3:]) for row in rows}
    return [Logged(request, forecasts.get(request.request_id)) for request in requests]


_REQUEST = tuple(field.name for field in dataclasses.fields(FinishedRequest))
_FORECAST = ("request_id", "mean", "quantiles", "source", "version", "rank")


def _select(columns: Sequence[str], table: str) -> str:
    return f"SELECT {', '.join(columns)} FROM {table}"


def _forecast(mean: float, quantiles: Sequence[float], source: str, version: int, rank: float | None) -> Forecast:
    return Forecast(
        mean, tuple(quantiles), 1, source, version, rank
    )  # The log does not keep the number of samples behind a forecast.


def _read_redis(url: str) -> list[Logged]:
    try:
        import redis

        from farsight.actors.log.log_redis import PREFIX, RedisLog, without_password
    except ModuleNotFoundError as error:
        raise ConfigError("LOG", "redis://", "a file, or the extra installed: pip install 'farsight[redis]'") from error
    shown = without_password(url)
    try:
        with redis.Redis.from_url(url) as connection:
            if not connection.exists(f"{PREFIX}version"):
                raise ConfigError("LOG", shown, "a Redis database with a log of Farsight; there is none")
        return asyncio.run(_pages(RedisLog(url, Retention(1, 1))))
    except (redis.RedisError, ValueError) as error:
        raise ConfigError("LOG", shown, f"a Redis server with a log ({error})") from error


async def _pages(log: LogBackend) -> list[Logged]:
    """All requests, and the forecasts of the requests that have one."""
    await log.open()
    try:
        requests: list[FinishedRequest] = []
        forecasts: dict[str, Forecast] = {}
        row = 0
        while (page := await log.read_requests(LogQuery(row, PAGE))).records:
            requests += page.records
            row = page.last_row
        row = 0
        while (examples := await log.read_examples(LogQuery(row, PAGE))).examples:
            for each in examples.examples:
                made = each.forecast
                forecasts[made.request_id] = _forecast(made.mean, made.quantiles, made.source, made.version, made.rank)
            row = examples.last_row
    finally:
        await log.close()
    return [Logged(request, forecasts.get(request.request_id)) for request in requests]
