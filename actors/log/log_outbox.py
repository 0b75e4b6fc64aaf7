"""The way of records to the log store, from the component that makes them."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Generic, TypeVar

from actors.runtime.peer import PeerLost
from core.errors import FarsightError, MessageError

SEND_S = 0.2
"""How often they go ..."""

PAGE = 1000
"""... so many in a message ..."""

MAX_UNLOGGED = 20_000
"""... and how many may wait; beyond them the oldest are lost."""

logger = logging.getLogger(__name__)

Record = TypeVar("Record")
Message = TypeVar("Message")


class LogOutbox(Generic[Record, Message]):
    """Keeps records until the log store has them: what is sent twice is written once.

    Args:
        send: Takes them at the log store, such as ``peers.log_store().append``.
        message: Puts records into its message.
    """

    def __init__(
        self, send: Callable[[Message], Awaitable[None]], message: Callable[[tuple[Record, ...]], Message]
    ) -> None:
        self._send = send
        self._message = message
        self._records: deque[Record] = deque(maxlen=MAX_UNLOGGED)

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        """Those that wait."""
        return iter(self._records)

    def add(self, record: Record) -> None:
        self._records.append(record)

    async def run(self) -> None:
        """Until cancelled. What cannot be written now, by a full disk or a Redis server that restarts, goes later.

        Raises:
            MessageError: a record is refused; it would be again.
        """
        told = False
        while True:
            await asyncio.sleep(SEND_S)
            while records := tuple(itertools.islice(self._records, PAGE)):
                try:
                    await self._send(self._message(records))
                except PeerLost:
                    break  # it comes back
                except MessageError:
                    raise
                except FarsightError as error:
                    if not told:
                        logger.warning("%d records wait: %s", len(self._records), error)
                    told = True
                    break
                told = False
                for record in records:
                    if self._records and self._records[0] is record:  # else it fell out at the end of the queue
                        self._records.popleft()
