"""``kill -9`` of the store or of the server behind it, in the middle of work: all it acknowledged is there, once."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from farsight.actors.log.log_store import LogStore
from farsight.core.errors import FarsightError
from tests.unit.actors.components import (
    append,
    append_forecasts,
    artefact,
    finished,
    forecast_record,
    list_artefacts,
    opened,
    put,
    read,
    read_examples,
    set_current,
    until,
    versions,
)
from tests.unit.actors.redis_server import redis_server

ROOT = Path(__file__).resolve().parents[4]

APPENDER = """
import asyncio, sys
from farsight.actors.log.log_store import LogStore
from tests.unit.actors.components import component_context
from tests.unit.actors.log.test_log_kill import append_one_after_another

async def main():
    store = LogStore(component_context("log-store", path=sys.argv[1]))
    await store.start()
    await asyncio.gather(*(append_one_after_another(store, name) for name in sys.argv[2].split()))

asyncio.run(main())
"""


async def append_one_after_another(store: LogStore, name: str) -> None:
    """Says, in lines that end in a dot, what has been acknowledged."""
    for i in range(1, 10**9):
        pair = f"{name}-{i}a", f"{name}-{i}b"
        await append_forecasts(store, *(forecast_record(each) for each in pair))
        await append(store, *(finished(each) for each in pair))
        await put(store, artefact(i, kind=name))
        await set_current(store, i, kind=name)
        sys.stdout.write(f"{name} {i}.\n")
        sys.stdout.flush()


@pytest.fixture(params=["sqlite", "redis"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Path or URL of a new log; a Redis server stays alive."""
    if request.param == "sqlite":
        yield str(tmp_path / "log.sqlite")
    else:
        with redis_server(tmp_path) as server:
            yield server.url


def killed_while_it_appends(path: str, names: list[str], num_lines: int) -> dict[str, int]:
    """What a store in another process acknowledged of each name until ``kill -9``, which hits it in the middle."""
    acknowledged: dict[str, int] = {}
    command = [sys.executable, "-c", APPENDER, path, " ".join(names)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for num_read, line in enumerate(process.stdout, 1):
            if num_read >= num_lines:
                process.kill()  # the rest of the pipe is read to its end
            if line.endswith(".\n"):  # the last line may be cut
                name, i = line.removesuffix(".\n").split()
                acknowledged[name] = int(i)
    assert process.returncode == -9
    return acknowledged


async def logged(store: LogStore) -> list[str]:
    """The ids of all finished requests, of which each is an example."""
    ids = [each.request_id for each in (await read(store, limit=10_000)).records]
    examples: list[str] = []
    page = await read_examples(store)
    while page.examples:
        examples += [each.finished.request_id for each in page.examples]
        page = await read_examples(store, page.last_row)
    assert examples == ids
    return ids


async def test_a_store_that_is_killed_has_kept_what_it_acknowledged(path: str) -> None:
    acknowledged: dict[str, int] = {}
    for round_ in range(3):
        new = killed_while_it_appends(path, [f"{name}{round_}" for name in "wxyz"], 40 + 17 * round_)
        assert sum(new.values()) >= 40
        acknowledged |= new
        async with opened(path=path) as store:
            ids = await logged(store)
            assert len(set(ids)) == len(ids)
            pairs = [each[:-1] for each in ids]
            assert pairs[::2] == pairs[1::2], "a message is in the log as a whole or not at all"
            for name, last in acknowledged.items():
                found = [int(each[:-1].split("-")[1]) for each in ids if each.startswith(f"{name}-")]
                assert found[::2] in ([*range(1, last + 1)], [*range(1, last + 2)]), (
                    "nothing that was acknowledged is lost"
                )
                kept, current = await versions(store, name)
                assert kept[-1] - last in (0, 1)
                assert current is not None
                assert current - last in (0, 1)
            assert all(each.num_bytes == len(artefact(1).data) for each in await list_artefacts(store))


class Appender:
    """Sends pairs of records as the ingress does: what was not acknowledged is sent again."""

    def __init__(self, store: LogStore) -> None:
        self.num_acknowledged = 0
        self.ends = False
        self._store = store

    async def run(self, name: str) -> int:
        """Until it is to end; returns how many pairs it has sent."""
        for i in range(10**9):
            if self.ends:
                return i
            pair = f"{name}-{i}a", f"{name}-{i}b"
            await self._send(partial(append_forecasts, self._store, *map(forecast_record, pair)))
            await self._send(partial(append, self._store, *map(finished, pair)))
            self.num_acknowledged += 1
        raise AssertionError

    async def _send(self, message: Callable[[], Awaitable[None]]) -> None:
        while True:
            with contextlib.suppress(FarsightError):
                return await message()
            await asyncio.sleep(0.01)


async def test_a_server_that_is_killed_has_kept_what_was_acknowledged_and_nothing_is_there_twice(
    tmp_path: Path,
) -> None:
    with redis_server(tmp_path) as server:
        async with opened(path=server.url) as store:
            appender = Appender(store)
            work = asyncio.gather(*map(appender.run, "wxyz"))
            for round_ in range(1, 5):
                await until(lambda least=25 * round_: appender.num_acknowledged >= least)  # type: ignore[misc]
                server.kill()  # in the middle of work
                await asyncio.to_thread(server.start)
            appender.ends = True
            numbers = dict(zip("wxyz", await work, strict=True))
            server.kill()
            server.start()
        async with opened(path=server.url) as store:
            ids = await logged(store)
            assert sorted(ids) == sorted(
                f"{name}-{i}{end}" for name in numbers for i in range(numbers[name]) for end in "ab"
            )
            assert (await read(store, 2**63 - 1, 0)).last_row == len(ids), "no row number was given away"
