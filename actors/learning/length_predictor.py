"""Forecasts output lengths from the log of finished requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence

from prometheus_client import Gauge

from farsight.actors.calls.scheduling import LengthPredictorCalls
from farsight.actors.learning.text_forecasts import TextForecasts
from farsight.actors.runtime.component import Component, ComponentContext
from farsight.actors.runtime.metrics import family
from farsight.actors.runtime.peer import PeerLost
from farsight.core.errors import FarsightError
from farsight.core.forecast import Forecast, ForecastQuestions, Forecasts
from farsight.core.messages.log import FinishedRequest, LogPage, LogQuery
from farsight.core.messages.status import LOG_READ
from farsight.policies.compose import predicts_requests
from farsight.predictor.history import HistoryPredictor

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
"""Seconds between two reads of the log."""

WINDOW = 1000
"""Number of finished requests that a forecast is computed from."""

PAGE = 1000
"""Records read at once: decoding them holds up the event loop for about 6 ms."""

_COMPLETE = ("stop", "length")
"""Finish reasons of outputs that were not cut off from outside."""

_END = 2**63 - 1
"""A row number above that of any log."""


class LengthPredictor(Component, LengthPredictorCalls):
    """Reads the log and keeps a forecast ready; its state is a function of the log alone."""

    kind = "LengthPredictor"

    def __init__(self, context: ComponentContext) -> None:
        super().__init__(context)
        text = "Expected output length of a request."
        self._gauge = family(context.registry, Gauge, "farsight:forecast_mean_tokens", text)
        self._log_store = context.peers.log_store()
        self._read_at: float | None = None
        self._failing = False
        self._row: int | None = None
        self._predictor = HistoryPredictor(WINDOW)
        self._reader: TextForecasts | None = None
        self._num_predicted = self._num_learnt = 0
        self._show()

    async def start(self) -> None:
        """Loads the artefact of ``farsight train`` if one is configured, else the version learned from own traffic.

        Raises:
            ConfigError: The artefact or its encoder cannot be loaded.
        """
        if predicts_requests(self.context.config):
            self._reader = await TextForecasts.load(self.context, self._log_store, self._predictor)
            for work in self._reader.work():
                self.spawn(work)
        self.spawn(self._follow())

    @property
    def queue(self) -> int:
        return 0 if self._reader is None else self._reader.num_open

    async def predict(self, questions: ForecastQuestions) -> Forecasts:
        if self._reader is None:
            raise FarsightError(f"{self.name} has no predictor.artefact, and no policy reads forecasts of requests")
        made = tuple(await self._reader.answer(questions.questions))
        self._num_predicted += len(made)
        if made:
            last = made[-1].within(questions.questions[-1].max_new_tokens)
            self.note("forecasts_made", num_requests=len(made), last_mean_tokens=last.mean)
        prefilled = tuple(self._reader.answer_prefilled(questions.prefilled))
        self._num_predicted += len(prefilled)
        return Forecasts(made, prefilled)

    @property
    def work_done(self) -> Mapping[str, float]:
        return {"requests forecast": self._num_predicted, "outputs learned": self._num_learnt}

    @property
    def last_step_age_s(self) -> float | None:
        return None if self._read_at is None else time.monotonic() - self._read_at

    async def forecast(self) -> Forecast:
        return self._predictor.current()

    async def _follow(self) -> None:
        while True:
            try:
                await self._catch_up()
                self._failing = False
                self.context.degraded.clear(LOG_READ)
            except PeerLost:
                pass  # the log store will be back; until then last_step_age_s shows the fault
            except Exception as error:  # one page that cannot be read is no reason to stop reading
                self.context.degraded.note(LOG_READ, f"forecasts do not follow the log: {error}")
                if not self._failing:  # logged once, not every second
                    logger.exception("%s cannot read the log", self.name)
                self._failing = True
            await asyncio.sleep(PERIOD_S)

    async def _catch_up(self) -> None:
        """Reads to the end of the log, or as far as it can."""
        if self._row is None:
            # Twice the window, because requests whose clients left do not count.
            self._row = max((await self._read(_END, limit=0)).last_row - 2 * WINDOW, 0)
        num_records = PAGE
        while num_records == PAGE:
            page = await self._read(self._row, PAGE)
            if page.last_row < self._row:
                logger.warning("the log ends at row %d, before row %d: learning starts over", page.last_row, self._row)
                self._start_over()
                return
            self._row = page.last_row
            self._learn(page.records)
            num_records = len(page.records)

    async def _read(self, after_row: int, limit: int) -> LogPage:
        page = await self._log_store.read(LogQuery(after_row, limit))
        self._read_at = time.monotonic()
        return page

    def _learn(self, records: Sequence[FinishedRequest]) -> None:
        since = self.context.site.model_since  # outputs of earlier weights tell nothing about these
        known = [each for each in records if each.received_at >= since and each.finish_reason in _COMPLETE]
        if self._reader is not None:
            self._reader.states.learn(known)
        lengths = [each.output_len for each in known if each.output_len]  # 0: nothing was to be generated
        self._predictor.learn(lengths)
        self._num_learnt += len(lengths)
        self._show()

    def _start_over(self) -> None:
        self._row = None
        self._predictor.clear()
        self._show()

    def _show(self) -> None:
        self._gauge.set(self._predictor.current().mean)
