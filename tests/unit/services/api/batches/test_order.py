"""Lines begin with the longest forecast of each window."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from core.forecast import QUANTILES, Forecast
from services.api.batches.lines import BatchLine
from services.api.batches.order import WINDOW_LINES, LongestFirst, longest_first


def forecast(mean: float, rank: float | None = None, version: int = 1) -> Forecast:
    return Forecast(mean, (mean,) * len(QUANTILES), 5, "forest", version, rank)


def numbered(count: int) -> list[tuple[int, BatchLine]]:
    return [(i, BatchLine(i + 1, f"c{i}", "/v1/completions", b"{}")) for i in range(count)]


def test_the_longest_come_first_and_equal_ones_keep_their_order() -> None:
    assert longest_first([forecast(5), forecast(9), forecast(5), forecast(7)]) == [1, 3, 0, 2]


def test_lines_without_a_forecast_come_last() -> None:
    assert longest_first([None, forecast(1), None, forecast(2)]) == [3, 1, 0, 2]
    assert longest_first([None, None]) == [0, 1]


def test_ranks_count_where_all_are_of_one_version() -> None:
    assert longest_first([forecast(5, rank=0.9), forecast(9, rank=0.1)]) == [0, 1]
    assert longest_first([forecast(5, rank=0.9), forecast(9, rank=0.1, version=2)]) == [1, 0], "else means"
    assert longest_first([forecast(5, rank=0.9), forecast(9)]) == [1, 0]


async def test_each_window_is_put_in_order_by_itself() -> None:
    asked: list[int] = []

    async def foresee(lines: Sequence[BatchLine]) -> list[Forecast | None]:
        asked.append(len(lines))
        return [forecast(line.number) for line in lines]

    order = LongestFirst(numbered(WINDOW_LINES + 3), foresee)
    taken = []
    while (each := await order.take()) is not None:
        taken.append(each[0])
    assert asked == [WINDOW_LINES, 3]
    assert taken == [*reversed(range(WINDOW_LINES)), WINDOW_LINES + 2, WINDOW_LINES + 1, WINDOW_LINES]
    assert await order.take() is None


async def test_several_takers_get_each_line_once() -> None:
    async def foresee(lines: Sequence[BatchLine]) -> list[Forecast | None]:
        await asyncio.sleep(0)
        return [forecast(1)] * len(lines)

    order = LongestFirst(numbered(2 * WINDOW_LINES), foresee)
    taken: list[int] = []

    async def work() -> None:
        while (each := await order.take()) is not None:
            taken.append(each[0])
            await asyncio.sleep(0)

    await asyncio.gather(*(work() for _ in range(7)))
    assert sorted(taken) == list(range(2 * WINDOW_LINES))


async def test_without_forecasts_lines_keep_their_order() -> None:
    order = LongestFirst(numbered(3), None)
    assert [(await order.take() or (None,))[0] for _ in range(4)] == [0, 1, 2, None]
