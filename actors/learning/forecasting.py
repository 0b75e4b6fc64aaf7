"""Forecasts of output lengths, several at a time, in a thread, within a share of one core."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from core.errors import FarsightError
from core.forecast import Forecast, ForecastQuestion
from core.messages.status import FORECASTS_FAIL, FORECASTS_SHED, SHED_SHOWN_S, Degraded
from predictor.shedding import Effort, EffortBudget
from predictor.text_predictor import TextPredictor

MAX_BATCH = 64
"""Questions that are answered together."""

NICENESS = 10
"""Niceness of the thread that answers."""


@dataclass(frozen=True, slots=True)
class ForecastAnswer:
    """A forecast and its features, packed as float32; empty if the request's own features were not computed."""

    forecast: Forecast
    features: bytes


class ForecastServer:
    """Answers questions in batches, in order of asking; questions that come during a batch form the next one.

    Args:
        predictor: The version that serves; ``swap`` replaces it between batches.
        cpu_share: Share of one core that full forecasts may take; beyond it forecasts use fewer features.
        degraded: Is notified when fewer features are used and when the model fails.
    """

    def __init__(self, predictor: TextPredictor, cpu_share: float, degraded: Degraded) -> None:
        self.predictor = predictor
        self._degraded = degraded
        self._cpu_share = cpu_share
        self._budget = EffortBudget(cpu_share)
        self._asked: asyncio.Queue[tuple[ForecastQuestion, asyncio.Future[ForecastAnswer]]] = asyncio.Queue()
        self._num_open = 0
        self._thread = ThreadPoolExecutor(1, "forecasts", initializer=_give_way)

    @property
    def num_open(self) -> int:
        """Questions without an answer yet."""
        return self._num_open

    def swap(self, predictor: TextPredictor) -> None:
        """Serves the next batch with another version."""
        self.predictor = predictor

    async def answer(self, questions: Sequence[ForecastQuestion]) -> list[ForecastAnswer]:
        """Returns one answer for each question.

        Raises:
            FarsightError: The model failed on the batch that holds them.
        """
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[ForecastAnswer]] = [loop.create_future() for _ in questions]
        for question, future in zip(questions, futures, strict=True):
            self._asked.put_nowait((question, future))
        self._num_open += len(questions)
        try:
            return await asyncio.gather(*futures)
        finally:
            self._num_open -= len(questions)

    async def run(self) -> None:
        """Serves until cancelled. An exception in a batch is raised in the callers of its questions."""
        loop = asyncio.get_running_loop()
        while True:
            batch = [await self._asked.get()]
            while len(batch) < MAX_BATCH and not self._asked.empty():
                batch.append(self._asked.get_nowait())
            questions = [question for question, _ in batch]
            effort = self._budget.choose(time.monotonic(), len(questions))
            try:
                work = loop.run_in_executor(self._thread, _answer, self.predictor, questions, effort)
                answers, seconds = await work
            except Exception as error:  # whatever the model raises: the next batch may succeed
                self._degraded.note(FORECASTS_FAIL, f"the predictor failed, requests go without a forecast: {error!r}")
                for _, future in batch:
                    if not future.done():
                        future.set_exception(FarsightError(f"no forecast: {error!r}"))
                continue
            self._degraded.clear(FORECASTS_FAIL)
            self._note_effort(effort)
            self._budget.spend(effort, seconds, len(questions))
            for (_, future), answer in zip(batch, answers, strict=True):
                if not future.done():  # else its caller was cancelled
                    future.set_result(answer)

    def _note_effort(self, effort: Effort) -> None:
        if effort is Effort.FULL:
            return
        used = "the last outputs alone" if effort is Effort.HISTORY else "the input's length"
        reason = f"forecasts rest on {used}: more would exceed predictor.cpu_share = {self._cpu_share:g}"
        self._degraded.note(FORECASTS_SHED, reason, time.monotonic(), SHED_SHOWN_S)


def _give_way() -> None:
    """Lowers this thread's priority: callers go on without a forecast, so serving comes first. Linux only."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _answer(
    predictor: TextPredictor, questions: list[ForecastQuestion], effort: Effort
) -> tuple[list[ForecastAnswer], float]:
    """Answers the questions; also returns the CPU seconds that this took."""
    began = time.thread_time()
    forecasts, features = predictor.forecast_with_features(questions, effort)
    packed = [b"" if row is None else row.tobytes() for row in features]
    answers = [ForecastAnswer(forecast, row) for forecast, row in zip(forecasts, packed, strict=True)]
    return answers, time.thread_time() - began
