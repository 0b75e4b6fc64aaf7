"""The log in a file: what has been committed is on disk, and what is not its own, it leaves alone."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiosqlite
import pytest

from farsight.actors.log.log_sqlite import SqliteLog
from farsight.actors.log.log_sqlite_schema import APPLICATION_ID, SQL_SCHEMA_VERSION, VERSION_1
from farsight.actors.log.log_store import FILE_NAME, LogStore
from farsight.core.errors import ConfigError, FarsightError
from tests.unit.actors.components import (
    append,
    append_forecasts,
    artefact,
    component_context,
    example_ids,
    finished,
    forecast_record,
    opened,
    put,
    read,
    read_ids,
    until,
    versions,
)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "log.sqlite")


def connection_of(store: LogStore) -> aiosqlite.Connection:
    assert isinstance(store._backend, SqliteLog)
    assert store._backend._connection is not None
    return store._backend._connection


async def test_many_appends_at_once_share_commits_and_none_is_lost(path: str) -> None:
    commits: list[str] = []
    async with opened(path=path) as store:
        await connection_of(store).set_trace_callback(lambda sql: commits.append(sql) if sql == "COMMIT" else None)
        tasks = [asyncio.create_task(append(store, finished(f"{i}"), finished(f"{i}-b"))) for i in range(100)]
        await asyncio.sleep(0)  # one turn of the loop: all of them have been given to the store
        assert store.queue == 200
        await asyncio.gather(*tasks)
        assert store.queue == 0
        assert len(set(await read_ids(store))) == 200
    assert len(commits) == 1


async def test_readers_see_nothing_before_its_commit(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(path=path) as store:
        await append(store, finished("a"))
        about_to_commit, go_on = asyncio.Event(), asyncio.Event()
        execute = connection_of(store).execute

        async def held_back(sql: str, *args: Any) -> Any:
            if sql == "COMMIT":
                about_to_commit.set()
                await go_on.wait()
            return await execute(sql, *args)

        monkeypatch.setattr(connection_of(store), "execute", held_back)
        writing = asyncio.create_task(append(store, finished("b")))
        await about_to_commit.wait()
        reading = asyncio.create_task(read_ids(store))
        await asyncio.wait([reading], timeout=0.1)
        too_early = reading.done()
        go_on.set()
        await writing
        assert not too_early
        assert await reading == ["a", "b"]


async def test_what_the_disk_refuses_is_told_and_not_counted_and_later_appends_work(path: str) -> None:
    async with opened(path=path) as store:
        await append(store, finished("a"))
        await connection_of(store).execute("PRAGMA query_only = ON")
        with pytest.raises(FarsightError, match=r"log-store cannot write: .*readonly"):
            await append(store, finished("b"))
        await connection_of(store).execute("PRAGMA query_only = OFF")
        assert store.queue == 0
        await append(store, finished("c"))
        assert await read_ids(store) == ["a", "c"]
        assert store.context.registry.get_sample_value("farsight:log_records_total", {"kind": "requests"}) == 2


async def test_every_commit_is_synced_to_a_write_ahead_log(path: str) -> None:
    async with opened(path=path) as store:
        for pragma, value in (("journal_mode", "wal"), ("synchronous", 2), ("user_version", SQL_SCHEMA_VERSION)):
            (row,) = await connection_of(store).execute_fetchall(f"PRAGMA {pragma}")
            assert row[0] == value


def no_database(path: Path) -> None:
    path.write_bytes(b"not a database, but someone's letter\n" * 100)


def foreign_database(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.executescript(f"CREATE TABLE bookmarks (url); PRAGMA user_version = {SQL_SCHEMA_VERSION};")
    connection.close()


def other_version(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.executescript(
        f"CREATE TABLE finished_requests (row); PRAGMA application_id = {APPLICATION_ID};"
        f"PRAGMA user_version = {SQL_SCHEMA_VERSION + 1};"
    )
    connection.close()


def damaged(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.executescript(
        f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {SQL_SCHEMA_VERSION};"
        "PRAGMA journal_mode = WAL;"
    )
    connection.close()


def empty_file(path: Path) -> None:
    path.touch()


def contents(path: str) -> dict[str, bytes | None]:
    """Everything in the folder of ``path``."""
    return {each.name: each.read_bytes() if each.is_file() else None for each in Path(path).parent.iterdir()}


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (no_database, "file is not a database"),
        (foreign_database, "another program's database"),
        (other_version, f"the file has version {SQL_SCHEMA_VERSION + 1}"),
        (Path.mkdir, "unable to open"),
        (damaged, "no such table"),
    ],
)
async def test_a_file_that_is_no_log_is_refused_and_left_alone(
    path: str, make: Callable[[Path], None], reason: str
) -> None:
    make(Path(path))
    before = contents(path)
    num_threads = threading.active_count()
    store = LogStore(component_context("log-store", path=path))
    with pytest.raises(ConfigError, match=reason) as caught:
        await store.start()
    assert (caught.value.field, caught.value.value) == ("log.path", path)
    await store.stop()
    await until(lambda: threading.active_count() <= num_threads)
    assert contents(path) == before


async def test_an_empty_file_becomes_a_log(path: str) -> None:
    empty_file(Path(path))
    async with opened(path=path) as store:
        await append(store, finished("a"))
        assert await read_ids(store) == ["a"]


async def test_a_name_that_sqlite_would_keep_in_memory_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with opened(path=":memory:"):
        assert (tmp_path / ":memory:").is_file()


async def test_without_a_path_it_lies_in_the_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARSIGHT_RUN_DIR", str(tmp_path))
    for names in (["a"], ["a", "b"]):
        async with opened() as store:
            await append(store, finished(names[-1]))
            assert await read_ids(store) == names
    assert (tmp_path / FILE_NAME).is_file()


async def test_without_a_run_directory_it_is_private_and_goes_with_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FARSIGHT_RUN_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    async with opened() as store:
        await append(store, finished("a"))
        (directory,) = os.listdir(tmp_path)
        assert os.stat(tmp_path / directory).st_mode & 0o077 == 0
        assert FILE_NAME in os.listdir(tmp_path / directory)
    assert os.listdir(tmp_path) == []


def previous_version(path: str) -> None:
    """A log of version 1, as that version wrote it."""
    connection = sqlite3.connect(path)
    for statement in VERSION_1:
        connection.execute(statement)
    connection.execute("PRAGMA user_version = 1")
    connection.execute("PRAGMA journal_mode = WAL")
    for name in "abc":
        row = (name, "0", 1, 5, 7, 100, "stop", 1.7e9 + 0.1, 0.1 + 0.2, 1.5)
        connection.execute("INSERT INTO finished_requests VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
    connection.execute("DELETE FROM finished_requests WHERE row = 1")
    connection.commit()
    connection.close()


async def test_a_log_of_the_previous_version_goes_on(path: str) -> None:
    previous_version(path)
    async with opened(path=path) as store:
        page = await read(store)
        assert (page.last_row, page.records) == (3, (finished("b"), finished("c")))
        await append_forecasts(store, forecast_record("b"), forecast_record("d"))
        await append(store, finished("c"), finished("d"))
        assert await read_ids(store, page.last_row) == ["d"]
        assert await example_ids(store) == ["b", "d"]
        await put(store, artefact(1))
    async with opened(path=path) as store:
        assert await read_ids(store) == ["b", "c", "d"]
        assert await versions(store) == ([1], None)


async def test_an_upgrade_that_fails_leaves_the_log_as_it_was(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    previous_version(path)
    steps = (VERSION_1, ("CREATE TABLE forecasts (row)", "CREATE TABLE finished_requests (row)"))
    with monkeypatch.context() as patched:
        patched.setattr("farsight.actors.log.log_sqlite.STEPS", steps)
        with pytest.raises(ConfigError, match="already exists"):
            await LogStore(component_context("log-store", path=path)).start()
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (1,)
    assert connection.execute("SELECT COUNT(*) FROM sqlite_schema WHERE name = 'forecasts'").fetchone() == (0,)
    connection.close()
    async with opened(path=path) as store:
        assert await read_ids(store) == ["b", "c"]


async def test_the_size_of_the_file_is_told(path: str) -> None:
    async with opened(path=path) as store:
        await put(store, artefact(1, bytes(10**6)))
        size = store.context.registry.get_sample_value("farsight:log_bytes")
        assert size is not None
        assert 10**6 < size < 2 * 10**6
    assert os.stat(path).st_size == size


async def test_old_records_make_room_in_the_file(path: str) -> None:
    features = bytes(1000)
    sizes: list[float] = []
    async with opened(path=path, max_rows=100) as store:
        for i in range(8):
            ids = [f"{i}-{j}" for j in range(100)]
            await append_forecasts(store, *(forecast_record(each, features=features) for each in ids))
            await append(store, *(finished(each) for each in ids))
            sizes.append(store.context.registry.get_sample_value("farsight:log_bytes") or 0)
    assert 0 < sizes[-1] < 1.1 * sizes[3]
