"""How new work is let into an event loop; time is counted in turns of the loop."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.api.middleware import PER_TURN, BodyLimit, LoopPace


class Turns:
    """Counts the turns of the running event loop."""

    def __init__(self) -> None:
        self.number = 0
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self.number += 1
        self._loop.call_soon(self._turn)


async def until(done: list[int], count: int) -> None:
    while len(done) < count:  # noqa: ASYNC110 - turns are what is counted
        await asyncio.sleep(0)


async def test_no_more_than_its_number_begins_in_a_turn_and_all_in_order() -> None:
    turns, pace = Turns(), LoopPace(4)
    began: list[int] = []
    order: list[int] = []

    async def work(index: int) -> None:
        await pace.turn()
        began.append(turns.number)
        order.append(index)

    tasks = [asyncio.create_task(work(index)) for index in range(101)]
    await asyncio.gather(*tasks)
    assert order == list(range(101))
    assert max(began.count(turn) for turn in set(began)) <= 4
    assert began[-1] - began[0] <= 101 // 4 + 1  # and no turn is wasted
    assert len(pace) == 0


async def test_work_that_comes_while_there_is_room_begins_at_once() -> None:
    pace = LoopPace(2)
    begun: list[int] = []
    for index in range(3):
        pace.submit(lambda index=index: begun.append(index))  # type: ignore[misc]
    assert begun == [0, 1]
    assert len(pace) == 1
    await until(begun, 3)


async def test_heavy_work_takes_the_room_of_the_turns_behind_it() -> None:
    turns, pace = Turns(), LoopPace(4)
    began: list[int] = []
    pace.submit(lambda: began.append(turns.number), 40)
    pace.submit(lambda: began.append(turns.number))
    await until(began, 2)
    assert 9 <= began[1] - began[0] <= 11


async def test_a_caller_that_is_gone_takes_no_room() -> None:
    turns, pace = Turns(), LoopPace(1)
    began: list[int] = []

    async def work() -> None:
        await pace.turn()
        began.append(turns.number)

    await pace.turn(20)
    gone = [asyncio.create_task(pace.turn(1000)) for _ in range(50)]
    last = asyncio.create_task(work())
    await asyncio.sleep(0)
    before = turns.number
    for task in gone:
        task.cancel()
    await last
    assert began[0] - before <= 25
    for task in gone:
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_it_rests_when_there_is_nothing_to_do() -> None:
    pace = LoopPace(1)
    begun: list[int] = []
    for index in range(3):
        pace.submit(lambda index=index: begun.append(index))  # type: ignore[misc]
    await until(begun, 3)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not pace._due  # no callback in the loop
    pace.submit(lambda: begun.append(3))
    assert begun == [0, 1, 2, 3]


class Weighed(LoopPace):
    """Writes down what it lets in."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[int] = []

    async def turn(self, weight: int = 1) -> None:
        self.weights.append(weight)


async def test_a_body_is_weighed_by_its_size_within_bounds_and_a_look_is_not() -> None:
    pace = Weighed()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()

    async def send(message: Any) -> None:
        pass

    for size in (0, 100, 10_000, 4_000_000):

        async def receive(size: int = size) -> dict[str, Any]:
            return {"type": "http.request", "body": b"x" * size}

        await BodyLimit(app, 5_000_000, pace)(
            {"type": "http", "method": "POST", "path": "/", "headers": []}, receive, send
        )
    assert pace.weights == [1, 3, 4 * PER_TURN]
