"""In which order the lines of a batch begin.

Where outputs are forecast, each window of lines begins with the longest: long jobs that begin last would run alone
at the end, while the other places stand empty (longest processing time first; Graham, "Bounds on multiprocessing
timing anomalies", 1969).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import islice

from core.forecast import Forecast
from services.api.batches.lines import BatchLine

WINDOW_LINES = 256
"""So many lines are forecast and put in order together: each line waits for the forecasts of its window alone, and a
forecaster that has learned from the first windows serves the later ones."""

Foresee = Callable[[Sequence[BatchLine]], Awaitable[Sequence[Forecast | None]]]
"""Forecasts the outputs of lines, in their order; None for a line of which nothing can be said."""


class LongestFirst:
    """Gives out numbered lines, window by window; several tasks may take from it.

    Args:
        lines: With the number by which their taker knows each.
        foresee: None where nothing is forecast: then the lines keep their order.
    """

    def __init__(self, lines: Iterable[tuple[int, BatchLine]], foresee: Foresee | None) -> None:
        self._lines = iter(lines)
        self._foresee = foresee
        self._window: list[tuple[int, BatchLine]] = []
        self._turn = asyncio.Lock()

    async def take(self) -> tuple[int, BatchLine] | None:
        """The next line; None after the last."""
        async with self._turn:
            if not self._window:
                self._window = await self._next_window()
            return self._window.pop() if self._window else None

    async def _next_window(self) -> list[tuple[int, BatchLine]]:
        """Lines in the reverse of the order in which they begin."""
        window = list(islice(self._lines, WINDOW_LINES))
        if self._foresee is not None and len(window) > 1:
            forecasts = await self._foresee([line for _, line in window])
            window = [window[index] for index in longest_first(forecasts)]
        window.reverse()
        return window


def longest_first(forecasts: Sequence[Forecast | None]) -> list[int]:
    """Indices by falling forecast; those of equal ones and, at the end, those without one in their order.

    Ranks are compared only where all forecasts have one of the same version (``Forecast.rank``), else means.
    """
    known = [each for each in forecasts if each is not None]
    comparable = len({(each.source, each.version) for each in known}) == 1
    by_rank = comparable and all(each.rank is not None for each in known)

    def key(index: int) -> tuple[bool, float]:
        forecast = forecasts[index]
        if forecast is None:
            return True, 0.0
        return False, -(forecast.rank if by_rank and forecast.rank is not None else forecast.mean)

    return sorted(range(len(forecasts)), key=key)
