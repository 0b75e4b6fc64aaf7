"""Forecasts from the served model's own hidden states, by one LengthPredictor."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress

from farsight.actors.calls.log_store import LogStoreCalls
from farsight.actors.runtime.peer import PeerLost, answer_of
from farsight.core.forecast import Forecast, StateQuestion
from farsight.core.messages.log import Artefact, ArtefactName, FinishedRequest
from farsight.predictor.artefact import ArtefactError, from_bytes
from farsight.predictor.states import StateRegression

logger = logging.getLogger(__name__)

SAVE_S = 60.0
"""Seconds between two looks whether there is more to save."""

SAVE_GROWTH = 0.1
"""What was learned is saved once the examples have grown by this share."""

MAX_OPEN = 4096
"""Most requests whose states wait for the ends of the requests; beyond it the oldest are forgotten."""


class StateForecasts:
    """Keeps the states of open requests, learns from each at its end, and forecasts what was prefilled.

    Args:
        weights_name: Names the served weights.
    """

    def __init__(self, log_store: LogStoreCalls, weights_name: str) -> None:
        self._log_store = log_store
        self._weights_name = weights_name
        self._kind = f"state-regression {weights_name}"
        self._open: OrderedDict[str, StateQuestion] = OrderedDict()
        self._regression: StateRegression | None = None
        self._saved_at = 0

    def answer(self, questions: Sequence[StateQuestion]) -> list[Forecast]:
        """Returns a forecast for each question; none at all while the forecasts before prefill are as good."""
        for each in questions:
            dim = len(each.state) // 2
            if self._regression is None or self._regression.dim != dim:
                self._regression = StateRegression(dim)
                self._open.clear()
            self._open[each.request_id] = each
        while len(self._open) > MAX_OPEN:
            self._open.popitem(last=False)
        regression = self._regression
        return regression.forecast(questions) if regression is not None and regression.serves else []

    def learn(self, ended: Sequence[FinishedRequest]) -> None:
        """Learns from those of the requests whose states are known; the others have nothing to tell."""
        known = [(self._open.pop(each.request_id, None), each.output_len) for each in ended]
        found = [(question, length) for question, length in known if question is not None and length]
        if found and self._regression is not None:
            self._regression.learn(found)

    async def load(self) -> None:
        """Goes on with what an earlier life has saved, if the log holds it intact."""
        infos = await answer_of(self._log_store.artefacts())
        mine = [] if infos is None else [each for each in infos.artefacts if each.kind == self._kind and each.current]
        if not mine:
            return
        found = await answer_of(self._log_store.read_artefact(ArtefactName(self._kind, mine[0].version)))
        if found is None:
            return
        try:
            artefact = await asyncio.to_thread(from_bytes, found.data, self._kind)
            self._regression = StateRegression.of_artefact(artefact, self._weights_name)
        except (ArtefactError, KeyError, ValueError) as error:
            logger.error("%s: %s; it is learned again", self._kind, error)
        if self._regression is not None:
            self._saved_at = self._regression.num_examples

    async def run(self) -> None:
        """Saves from time to time, until cancelled; only one of several predictors does."""
        while True:
            await asyncio.sleep(SAVE_S)
            regression = self._regression
            if regression is not None and regression.num_examples > (1 + SAVE_GROWTH) * self._saved_at:
                with suppress(PeerLost):  # the log store will be back
                    await self._save(regression)

    async def _save(self, regression: StateRegression) -> None:
        num, artefact = regression.num_examples, regression.to_artefact(self._weights_name)
        data = await asyncio.to_thread(artefact.to_bytes)
        note = "learned while serving from hidden states of prompts"
        await self._log_store.put_artefact(Artefact(self._kind, num, time.time(), None, num, note, data))
        await self._log_store.set_current(ArtefactName(self._kind, num))
        self._saved_at = num
