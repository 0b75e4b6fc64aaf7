"""In which order the lines of a batch begin.

Where outputs are forecast, each window of lines begins with the longest: long jobs that begin last would run alone
at the end, while the other places stand empty (longest processing time first; Graham, "Bounds on multiprocessing
timing anomalies", 1969).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from itertools import islice

from farsight.core.forecast import Forecast
from farsight.services.api.batches.lines import BatchLine

WINDOW_LINES = 256
"""So many lines are forecast and put in order together: each line waits for the forecasts of its window alone, and a
forecaster that has learned from the first windows serves the later ones."""

ForecastLines = Callable[[Sequence[BatchLine]], Awaitable[Sequence[Forecast | None]]]
"""Forecasts the outputs of lines, in their order; None for a line of which nothing can be said."""


async def in_order(lines: Iterable[BatchLine], forecast_lines: ForecastLines | None) -> AsyncGenerator[BatchLine, None]:
    """Yields the lines in the order in which they begin, which is theirs where outputs are not forecast."""
    rest = iter(lines)
    while window := list(islice(rest, WINDOW_LINES)):
        if forecast_lines is not None and len(window) > 1:
            forecasts = await forecast_lines(window)
            window = [window[index] for index in longest_first(forecasts)]
        for line in window:
            yield line


def longest_first(forecasts: Sequence[Forecast | None]) -> list[int]:
    """Returns the indices by falling forecast; those of equal ones and, at the end, those without one in their order.

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
