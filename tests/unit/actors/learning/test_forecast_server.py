"""A predictor that answers with less than it could, or fails, says so."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import pytest

from farsight.actors.learning.text_forecasts import ForecastServer
from farsight.core.errors import FarsightError
from farsight.core.forecast import QUANTILES, Forecast, ForecastQuestion
from farsight.core.messages.status import FORECASTS_FAIL, FORECASTS_SHED, Degraded
from farsight.predictor.shedding import Effort

QUESTION = ForecastQuestion("a", "say", "hello", 1, 2, 16)


class Predictor:
    """Answers with the effort that it was allowed."""

    def __init__(self) -> None:
        self.fails = False

    def forecast_with_features(self, questions: list[ForecastQuestion], effort: Effort) -> Any:
        if self.fails:
            raise ZeroDivisionError("the trees are gone")
        end = time.thread_time() + 0.02
        while effort is Effort.FULL and time.thread_time() < end:
            pass
        made = Forecast(7.0, tuple(7.0 for _ in QUANTILES), 5, "words", 1)
        return [made for _ in questions], [None for _ in questions]


async def test_forecasts_that_are_shed_or_fail_are_said() -> None:
    degraded, predictor = Degraded(), Predictor()
    server = ForecastServer(cast(Any, predictor), 1e-6, degraded)
    running = asyncio.create_task(server.run())
    try:
        assert not list(degraded.causes(0.0))
        for _ in range(100):  # a second is saved up at the start
            await server.answer([QUESTION])
        assert dict(degraded.causes(time.monotonic())) == {FORECASTS_SHED: True}
        assert "predictor.cpu_share = 1e-06" in degraded.reason(time.monotonic())
        predictor.fails = True
        with pytest.raises(FarsightError):
            await server.answer([QUESTION])
        assert "the trees are gone" in degraded.reason(time.monotonic())
        predictor.fails = False
        await server.answer([QUESTION])
        assert dict(degraded.causes(0.0))[FORECASTS_FAIL] is False
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
