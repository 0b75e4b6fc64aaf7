"""Records on their way to the log: a log that cannot be written delays them and does no other harm."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from farsight.actors.log import log_outbox
from farsight.actors.log.log_outbox import LogOutbox
from farsight.actors.runtime.peer import PeerLost
from farsight.core.errors import FarsightError, MessageError
from farsight.core.messages.log import FinishedRequest, LogRecords
from farsight.core.messages.status import Degraded
from tests.unit.actors.components import LONG_S, finished, until


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_outbox, "SEND_S", 0.005)


class Log:
    """A log store in memory that can fail on demand."""

    def __init__(self) -> None:
        self.degraded = Degraded()
        self.failure: Exception | None = None
        self.num_calls = 0
        self.records: list[FinishedRequest] = []

    async def append(self, new: LogRecords) -> None:
        self.num_calls += 1
        if self.failure is not None:
            raise self.failure
        self.records += new.requests


@asynccontextmanager
async def sending(log: Log) -> AsyncIterator[tuple[LogOutbox[FinishedRequest], asyncio.Task[None]]]:
    outbox = LogOutbox(log.append, LogRecords, log.degraded)
    task = asyncio.create_task(outbox.run())
    try:
        yield outbox, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("failure", [PeerLost("log-store"), FarsightError("log-store cannot write: the disk is full")])
async def test_what_cannot_be_written_goes_later(failure: Exception, caplog: pytest.LogCaptureFixture) -> None:
    log = Log()
    log.failure = failure
    async with sending(log) as (outbox, task):
        outbox.add(finished("a"))
        await until(lambda: log.num_calls >= 3)
        outbox.add(finished("b"))
        assert not task.done() and len(outbox) == 2
        assert "log records wait" in log.degraded.reason(0.0)
        log.failure = None
        await until(lambda: len(outbox) == 0)
    assert [each.request_id for each in log.records] == ["a", "b"]
    assert log.degraded.reason(0.0) == ""
    told = [record.getMessage() for record in caplog.records]
    assert told == (
        [] if isinstance(failure, PeerLost) else [f"1 log records wait and will be sent again: {failure}"]
    ), "told once"


async def test_a_record_that_is_refused_is_a_defect_of_ours() -> None:
    log = Log()
    log.failure = MessageError("records", 7, "something else")
    async with sending(log) as (outbox, task):
        outbox.add(finished("a"))
        with pytest.raises(MessageError):
            await asyncio.wait_for(task, LONG_S)


async def test_records_that_are_lost_are_counted_and_said() -> None:
    log = Log()
    outbox = LogOutbox(log.append, LogRecords, log.degraded)
    for number in range(log_outbox.MAX_UNLOGGED + 2):
        outbox.add(finished(str(number)))
    assert "2 log records were lost" in log.degraded.reason(time.monotonic())
    assert log.degraded.reason(time.monotonic() + log_outbox.LOST_SHOWN_S) == ""
