"""Sends records from the component that makes them to the log store."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Generic, TypeVar

from farsight.actors.runtime.peer import PeerLost
from farsight.core.errors import FarsightError, MessageError
from farsight.core.messages.log import LogRecords
from farsight.core.messages.status import RECORDS_LOST, RECORDS_WAIT, Degraded

SEND_S = 0.2
"""Seconds between two messages."""

PAGE = 1000
"""Most records in one message."""

MAX_UNLOGGED = 20_000
"""Most records that wait; beyond this number the oldest are lost."""

LOST_SHOWN_S = 60.0
"""Seconds for which the status says that records were lost."""

logger = logging.getLogger(__name__)

Record = TypeVar("Record")


class LogOutbox(Generic[Record]):
    """Keeps records until the log store has written them; the store writes a record that is sent twice only once.

    Args:
        send: ``peers.log_store().append``.
        message: Makes a message from records.
        degraded: Is notified while records wait because of a fault, and when records are lost.
    """

    def __init__(
        self,
        send: Callable[[LogRecords], Awaitable[None]],
        message: Callable[[tuple[Record, ...]], LogRecords],
        degraded: Degraded,
    ) -> None:
        self._degraded = degraded
        self._num_lost = 0
        self._send = send
        self._message = message
        self._records: deque[Record] = deque(maxlen=MAX_UNLOGGED)
        self._due = asyncio.Event()

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        """Iterates over the waiting records, oldest first."""
        return iter(self._records)

    def add(self, record: Record) -> None:
        if len(self._records) == MAX_UNLOGGED:
            self._num_lost += 1
            reason = f"{self._num_lost} log records were lost: {MAX_UNLOGGED} wait already"
            self._degraded.note(RECORDS_LOST, reason, time.monotonic(), LOST_SHOWN_S)
        self._records.append(record)
        self._due.set()

    async def run(self) -> None:
        """Sends records until cancelled; records that cannot be written now (full disk, Redis restart) are sent later.

        Raises:
            MessageError: The log store refuses a record, and would refuse it again.
        """
        told = False
        while True:
            await self._due.wait()
            await asyncio.sleep(SEND_S)
            self._due.clear()
            while records := tuple(itertools.islice(self._records, PAGE)):
                try:
                    await self._send(self._message(records))
                except PeerLost:
                    self._note_waiting("the log store is not there")
                    self._due.set()
                    break  # the log store will be back
                except MessageError:
                    raise
                except FarsightError as error:
                    self._note_waiting(str(error))
                    if not told:
                        logger.warning("%d log records wait and will be sent again: %s", len(self._records), error)
                    told = True
                    self._due.set()
                    break
                told = False
                self._degraded.clear(RECORDS_WAIT)
                for record in records:
                    if self._records and self._records[0] is record:  # else the full queue dropped it meanwhile
                        self._records.popleft()

    def _note_waiting(self, reason: str) -> None:
        self._degraded.note(RECORDS_WAIT, f"{len(self._records)} log records wait and will be sent again: {reason}")
