"""How fast new work may come into an event loop that has streams to serve."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

PER_TURN = 4
"""A request takes about 2 ms of the loop, spread over half a dozen turns, until it is on its way to the Router. With
four new ones in each turn, a turn takes some 10 ms, however many wait."""


class Pace:
    """Lets so much new work begin between two turns of the event loop; the rest waits, first come, first served.

    Without it, requests that come together do each of their steps together: whatever else is due, the answer to a
    health check or a token of a stream, waits until all of them have done the step. Work that comes while there is room
    begins at once.

    Args:
        per_turn: Weight of the work that may begin in one turn. Heavier work takes the room of the turns behind it.
    """

    def __init__(self, per_turn: int = PER_TURN) -> None:
        self._per_turn = per_turn
        self._left = per_turn
        self._waiting: deque[tuple[Callable[[], None], int]] = deque()
        self._due = False

    def __len__(self) -> int:
        """How many jobs wait."""
        return len(self._waiting)

    def submit(self, job: Callable[[], None], weight: int = 1) -> None:
        """Runs the job, now if there is room, else in the turn that has it; on the running event loop."""
        if self._left > 0 and not self._waiting:
            self._run(job, weight)
        else:
            self._waiting.append((job, weight))

    async def turn(self, weight: int = 1) -> None:
        """Returns when there is room; a caller that is cancelled meanwhile takes none."""
        if self._left > 0 and not self._waiting:
            self._run(_nothing, weight)
            return
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def admit() -> None:
            if admitted.done():
                self._left += weight
            else:
                admitted.set_result(None)

        self._waiting.append((admit, weight))
        await admitted

    def _run(self, job: Callable[[], None], weight: int) -> None:
        self._left -= weight
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._next_turn)
        job()

    def _next_turn(self) -> None:
        self._due = False
        self._left = min(self._per_turn, self._left + self._per_turn)
        while self._waiting and self._left > 0:
            self._run(*self._waiting.popleft())
        if not self._due and (self._waiting or self._left < self._per_turn):
            self._due = True
            asyncio.get_running_loop().call_soon(self._next_turn)


def _nothing() -> None:
    """The caller goes on by itself."""
