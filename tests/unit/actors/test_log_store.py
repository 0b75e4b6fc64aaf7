"""What the log has acknowledged, it keeps; what is not its own, it leaves alone."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from actors.log_store import APPLICATION_ID, FILE_NAME, MAX_PAGE, SQL_SCHEMA_VERSION, LogStore
from core.codec import encode
from core.errors import ConfigError, FarsightError, MessageError
from core.messages import FinishedRequest, FinishedRequests
from tests.unit.actors.pieces import append, finished, piece_context, read, read_ids, until

ROOT = Path(__file__).resolve().parents[3]

APPENDER = """
import asyncio, sys
from actors.log_store import LogStore
from tests.unit.actors.pieces import append, finished, piece_context

async def loop(store, name):
    for i in range(10**9):
        await append(store, finished(f"{name}-{i}a"), finished(f"{name}-{i}b"))
        print(f"{name}-{i}a {name}-{i}b.", flush=True)

async def main():
    store = LogStore(piece_context("log-store", path=sys.argv[1]))
    await store.start()
    await asyncio.gather(*(loop(store, name) for name in sys.argv[2].split()))

asyncio.run(main())
"""


@asynccontextmanager
async def opened(**log: Any) -> AsyncIterator[LogStore]:
    store = LogStore(piece_context("log-store", **log))
    await store.start()
    try:
        yield store
    finally:
        await store.stop()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "log.sqlite")


async def all_ids(store: LogStore) -> list[str]:
    """However many pages that takes."""
    ids: list[str] = []
    page = await read(store)
    while page.records:
        ids += [each.request_id for each in page.records]
        page = await read(store, page.last_row)
    return ids


def num_counted(store: LogStore) -> float | None:
    return store.context.registry.get_sample_value("farsight:log_records_total")


async def test_what_goes_in_comes_out_in_order(path: str) -> None:
    records = [
        finished("a"),
        FinishedRequest("b", "1", 3, 2**63 - 1, 0, 0, "abort", 0.1 + 0.2, None, 1e-300),
        finished("ü\0'\"; DROP TABLE finished_requests"),
    ]
    async with opened(path=path) as store:
        assert store.last_step_age_s is None
        await append(store, *records[:1])
        await append(store, *records[1:])
        page = await read(store)
        assert page.records == tuple(records)
        assert page.last_row == 3
        assert num_counted(store) == 3
        assert (store.kind, store.name, store.state, store.queue) == ("LogStore", "log-store", "ready", 0)
        assert store.last_step_age_s is not None
        assert store.last_step_age_s >= 0


async def test_pages_follow_one_another_and_the_end_is_told(path: str) -> None:
    async with opened(path=path) as store:
        assert (await read(store)).last_row == 0
        await append(store, *(finished(f"{i}") for i in range(7)))
        first = await read(store, 0, 4)
        second = await read(store, first.last_row, 4)
        assert [each.request_id for each in first.records + second.records] == [f"{i}" for i in range(7)]
        assert (first.last_row, second.last_row) == (4, 7)
        assert await read(store, 7, 4) == await read(store, 2**63 - 1, 0) == await read(store, 2**64 - 1, 5)
        assert (await read(store, 7, 4)).last_row == 7
        assert (await read(store, 5, 0)).last_row == 5
        assert (await read(store, 0, -1)).records == ()


async def test_a_page_has_its_limit_whatever_is_asked_for(path: str) -> None:
    async with opened(path=path) as store:
        await append(store, *(finished(f"{i}") for i in range(MAX_PAGE + 1)))
        page = await read(store, 0, 10**9)
        assert (len(page.records), page.last_row) == (MAX_PAGE, MAX_PAGE)


async def test_a_request_is_written_once(path: str) -> None:
    async with opened(path=path) as store:
        await append(store, finished("a", 1), finished("a", 2))
        await append(store, finished("b", 3), finished("a", 4))
        assert [(each.request_id, each.output_len) for each in (await read(store)).records] == [("a", 1), ("b", 3)]
        assert num_counted(store) == 2
        await append(store)


async def test_the_oldest_go_when_there_are_too_many_and_duplicates_do_not_count(path: str) -> None:
    async with opened(path=path, max_rows=5) as store:
        for i in range(20):
            await append(store, finished(f"{i}"), finished(f"{i}"))
            assert await read_ids(store) == [f"{j}" for j in range(max(0, i - 4), i + 1)]
        await append(store, *(finished(f"big-{i}") for i in range(8)))
        assert await read_ids(store) == [f"big-{i}" for i in range(3, 8)]


async def test_a_restart_goes_on_where_the_file_ends(path: str) -> None:
    async with opened(path=path, max_rows=4) as store:
        await append(store, finished("a"), finished("b"), finished("c"))
        last_row = (await read(store)).last_row
    async with opened(path=path, max_rows=4) as store:
        await append(store, finished("b"), finished("d"), finished("e"))
        assert await read_ids(store, last_row) == ["d", "e"]
        assert await read_ids(store) == ["b", "c", "d", "e"]
    async with opened(path=path, max_rows=2) as store:
        await append(store, finished("f"))
        assert await read_ids(store) == ["e", "f"], "a limit that was lowered holds"


async def test_many_appends_at_once_share_commits_and_none_is_lost(path: str) -> None:
    commits: list[str] = []
    async with opened(path=path) as store:
        assert store._connection is not None
        await store._connection.set_trace_callback(lambda sql: commits.append(sql) if sql == "COMMIT" else None)
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
        assert store._connection is not None
        execute = store._connection.execute

        async def held_back(sql: str, *args: Any) -> Any:
            if sql == "COMMIT":
                about_to_commit.set()
                await go_on.wait()
            return await execute(sql, *args)

        monkeypatch.setattr(store._connection, "execute", held_back)
        writing = asyncio.create_task(append(store, finished("b")))
        await about_to_commit.wait()
        reading = asyncio.create_task(read_ids(store))
        await asyncio.wait([reading], timeout=0.1)
        too_early = reading.done()
        go_on.set()
        await writing
        assert not too_early
        assert await reading == ["a", "b"]


async def test_a_caller_that_gave_up_harms_nobody(path: str) -> None:
    async with opened(path=path) as store:
        tasks = [asyncio.create_task(append(store, finished(name))) for name in "abc"]
        await asyncio.sleep(0)
        assert store.queue == 3
        tasks[1].cancel()
        await asyncio.wait(tasks)
        await append(store, finished("d"))
        assert {"a", "c", "d"} <= set(await read_ids(store))


async def test_what_the_disk_refuses_is_told_and_not_counted_and_later_appends_work(path: str) -> None:
    async with opened(path=path) as store:
        await append(store, finished("a"))
        assert store._connection is not None
        await store._connection.execute("PRAGMA query_only = ON")
        with pytest.raises(FarsightError, match=r"log-store cannot write: .*readonly"):
            await append(store, finished("b"))
        await store._connection.execute("PRAGMA query_only = OFF")
        assert store.queue == 0
        await append(store, finished("c"))
        assert await read_ids(store) == ["a", "c"]
        assert num_counted(store) == 2


async def test_a_number_too_large_is_refused_by_name_and_spoils_no_other_append(path: str) -> None:
    async with opened(path=path) as store:
        good = asyncio.create_task(append(store, finished("a")))
        with pytest.raises(MessageError, match="output_len"):
            await append(store, finished("b", 2**63))
        await good
        assert await read_ids(store) == ["a"]


async def test_closing_writes_what_was_given_and_then_refuses(path: str) -> None:
    async with opened(path=path) as store:
        tasks = [asyncio.create_task(append(store, finished(f"{i}"))) for i in range(10)]
        await asyncio.sleep(0)
        assert store.queue == 10
        await store.stop()
        await asyncio.gather(*tasks)
        for late in (append(store, finished("late")), read(store)):
            with pytest.raises(FarsightError, match="log-store is closed"):
                await late
    async with opened(path=path) as store:
        assert len(await read_ids(store)) == 10


async def test_every_commit_is_synced_to_a_write_ahead_log(path: str) -> None:
    async with opened(path=path) as store:
        assert store._connection is not None
        for pragma, value in (("journal_mode", "wal"), ("synchronous", 2), ("user_version", SQL_SCHEMA_VERSION)):
            (row,) = await store._connection.execute_fetchall(f"PRAGMA {pragma}")
            assert row[0] == value


def killed_while_it_appends(path: str, round_: int, num_acknowledged: int) -> set[str]:
    """The ids that a store in another process acknowledged until ``kill -9``, which hits it in the middle of work."""
    command = [sys.executable, "-c", APPENDER, path, " ".join(f"{name}-{round_}" for name in "wxyz")]
    acknowledged: list[str] = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if len(acknowledged) >= num_acknowledged:
                process.kill()  # the rest of the pipe is read to its end
            if line.endswith(".\n"):  # the last line may be cut
                acknowledged += line.removesuffix(".\n").split()
    assert process.returncode == -9
    return set(acknowledged)


async def test_kill_9_loses_nothing_that_was_acknowledged(path: str) -> None:
    acknowledged: set[str] = set()
    for round_ in range(3):
        new = killed_while_it_appends(path, round_, 100 + 37 * round_)
        assert len(new) >= 100
        acknowledged |= new
        async with opened(path=path) as store:
            ids = await all_ids(store)
            assert acknowledged <= set(ids)
            assert len(set(ids)) == len(ids)
            pairs = [each[:-1] for each in ids]
            assert pairs[::2] == pairs[1::2], "a message is in the log as a whole or not at all"


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
        (other_version, f"this is of {SQL_SCHEMA_VERSION + 1}"),
        (Path.mkdir, "unable to open"),
    ],
)
async def test_a_file_that_is_no_log_is_refused_and_left_alone(
    path: str, make: Callable[[Path], None], reason: str
) -> None:
    make(Path(path))
    before = contents(path)
    num_threads = threading.active_count()
    store = LogStore(piece_context("log-store", path=path))
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


async def test_another_store_may_follow_in_the_same_process(path: str) -> None:
    context = piece_context("log-store", path=path)
    for name in "ab":
        store = LogStore(context)
        await store.start()
        await append(store, finished(name))
        await store.stop()
        assert not store.failed.done()
    assert context.registry.get_sample_value("farsight:log_records_total") == 2


async def test_a_message_of_another_kind_is_refused(path: str) -> None:
    async with opened(path=path) as store:
        with pytest.raises(MessageError, match="FinishedRequests"):
            await store.append(b"\xc1")
        with pytest.raises(MessageError, match="LogQuery"):
            await store.read(encode(FinishedRequests(())))
