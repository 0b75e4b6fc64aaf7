"""Limits how fast new work enters an event loop that also serves streams."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

PER_TURN = 4
"""A request uses about 2 ms of the loop, spread over about six turns, until it is sent to the Router. With four new
requests per turn, a turn takes about 10 ms, however many requests wait."""


class Pace:
    """Lets a limited weight of new work begin in each turn of the event loop; the rest waits in FCFS order.

    Without it, requests that arrive together do each of their steps together, and everything else that is due, such as
    the reply to a health check or a token of a stream, waits until all of them have done the step. Work that arrives
    while there is room begins at once.

    Args:
        per_turn: Weight of the work that may begin in one turn. Heavier work also uses the room of later turns.
    """

    def __init__(self, per_turn: int = PER_TURN) -> None:
        self._per_turn = per_turn
        self._left = per_turn
        self._waiting: deque[tuple[Callable[[], None], int]] = deque()
        self._due = False

    def __len__(self) -> int:
        """The number of waiting jobs."""
        return len(self._waiting)

    def submit(self, job: Callable[[], None], weight: int = 1) -> None:
        """Runs the job on the running event loop: now if there is room, else in the first turn with room."""
        if self._left > 0 and not self._waiting:
            self._run(job, weight)
        else:
            self._waiting.append((job, weight))

    async def turn(self, weight: int = 1) -> None:
        """Returns when there is room; a caller that is cancelled while it waits uses no room."""
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
    """Does nothing: the waiting caller continues by itself."""
