"""Serves, logs and updates the forecasts of a length predictor that has an artefact."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

from actors.calls.log_store import LogStoreCalls
from actors.learning.application_secret import application_secret
from actors.learning.forecasting import ForecastAnswer, ForecastServer
from actors.learning.length_learner import LengthLearner
from actors.learning.model_registry import ModelRegistry
from actors.log.log_outbox import LogOutbox
from actors.runtime.component import ComponentContext
from actors.runtime.peer import PeerLost
from core.config.learning import PredictorConfig
from core.errors import ConfigError, FarsightError
from core.forecast import Forecast, ForecastQuestion
from core.messages.log import ForecastRecord, ForecastRecords
from predictor.applications.start import untrained, untrained_with_encoder
from predictor.artefact import TrainedModel, load
from predictor.encoders import Encoder, Scorer
from predictor.history import HistoryPredictor
from predictor.retraining import MAX_FEATURES, can_be_retrained, feature_set
from predictor.text_predictor import TextPredictor

logger = logging.getLogger(__name__)

KEEP_UP_S = 5.0
"""Seconds between two searches for a newer version, by a predictor that does not learn itself."""


class TextForecasts:
    """The forecasts of one LengthPredictor; ``load`` makes it.

    Args:
        artefact: The first version.
        predictor: The predictor that serves this version.
        history: Answers when a forecast from the text would cost too much CPU time.
    """

    def __init__(
        self,
        context: ComponentContext,
        log_store: LogStoreCalls,
        artefact: TrainedModel,
        predictor: TextPredictor,
        history: HistoryPredictor,
    ) -> None:
        self._settings = context.config.predictor
        self._is_learner = context.index == "0"
        self._log_store = log_store
        self._artefact = artefact
        self._text_model = predictor.encoder
        self._history = history
        self._feature_set = feature_set(artefact)
        self._registry = ModelRegistry(log_store, artefact, context.registry)
        self._server = ForecastServer(predictor, self._settings.cpu_share, context.degraded)
        self._outbox = LogOutbox(log_store.append_forecasts, ForecastRecords, context.degraded)
        self._version = _version(context.registry)
        self._counter = _counter(context.registry)
        self._version.set(predictor.version)

    @classmethod
    async def load(
        cls, context: ComponentContext, log_store: LogStoreCalls, history: HistoryPredictor
    ) -> TextForecasts:
        """Loads the configured artefact, or makes an untrained one; uses the newest version learned from it since.

        Raises:
            ConfigError: The artefact or its encoder cannot be loaded.
        """
        settings = context.config.predictor
        if settings.artefact:
            artefact, text_model = await asyncio.to_thread(_load, settings)
        else:
            weights = f"{context.config.model.name} {context.site.model_since:.0f}"
            if settings.encoder:
                artefact, text_model = await asyncio.to_thread(_begin_with_encoder, settings, weights)
            else:
                secret = await application_secret(log_store)
                artefact, text_model = untrained(weights, secret, settings.num_trees), None
            logger.info("no predictor.artefact: output lengths are learned from this service's own requests")
        predictor = TextPredictor(artefact, text_model, history)
        forecasts = cls(context, log_store, artefact, predictor, history)
        await forecasts._look_for_newer()
        return forecasts

    def work(self) -> list[Coroutine[Any, Any, None]]:
        """Returns the coroutines that must run as long as the predictor serves."""
        work = [self._server.run(), self._outbox.run()]
        if self._settings.learn and can_be_retrained(self._artefact):
            learner = LengthLearner(self._log_store, self._registry, self._artefact, self._use, self._settings)
            work.append(learner.run() if self._is_learner else self._keep_up())
        return work

    @property
    def num_open(self) -> int:
        """Questions without an answer yet."""
        return self._server.num_open

    async def answer(self, questions: Sequence[ForecastQuestion]) -> list[Forecast]:
        """Returns one forecast for each question; logs the forecasts together with their features."""
        answers = await self._server.answer(questions)
        now = time.time()
        for question, answer in zip(questions, answers, strict=True):
            self._outbox.add(_record(question.request_id, now, answer, self._feature_set))
            self._counter.labels(answer.forecast.source).inc()
        return [answer.forecast for answer in answers]

    def _use(self, artefact: TrainedModel) -> None:
        """Serves this version from the next batch on."""
        self._artefact = artefact
        predictor = TextPredictor(artefact, self._text_model, self._history)
        self._server.swap(predictor)
        self._version.set(predictor.version)

    async def _look_for_newer(self) -> None:
        try:
            newest = await self._registry.newest(int(self._artefact.metadata["version"]))
        except PeerLost:
            return
        if newest is not None:
            self._use(newest)

    async def _keep_up(self) -> None:
        """Switches to each newer version that another predictor has learned."""
        while True:
            await asyncio.sleep(KEEP_UP_S)
            await self._look_for_newer()


@functools.cache
def _version(registry: CollectorRegistry) -> Gauge:
    """Makes one gauge for each registry: a process may stop a predictor and start another."""
    return Gauge("farsight:forecast_version", "Version of the predictor that serves.", registry=registry)


@functools.cache
def _counter(registry: CollectorRegistry) -> Counter:
    return Counter("farsight:forecasts", "Forecasts, by the predictor that made them.", ("source",), registry=registry)


def _load(settings: PredictorConfig) -> tuple[TrainedModel, Encoder | Scorer | None]:
    from engine.encoders.regressor import text_model_of  # loads torch, which only these predictors need

    path = Path(settings.artefact)
    try:
        artefact = load(path)
        return artefact, text_model_of(artefact, settings.encoder, settings.device)
    except FarsightError as error:
        expected = f"a directory of `farsight train` ({error})"
        raise ConfigError("predictor.artefact", str(path), expected) from error


def _begin_with_encoder(settings: PredictorConfig, weights: str) -> tuple[TrainedModel, Encoder]:
    from engine.encoders.text_encoder import TextEncoder

    try:
        encoder = TextEncoder(settings.encoder, settings.device)
        return untrained_with_encoder(encoder, weights, settings.num_trees), encoder
    except FarsightError as error:
        raise ConfigError("predictor.encoder", settings.encoder, f"a text encoder ({error})") from error


def _record(request_id: str, made_at: float, answer: ForecastAnswer, features: str) -> ForecastRecord:
    """Makes the log record of a forecast. Wide features are left out: no learner trains on them."""
    forecast = answer.forecast
    fits = len(answer.features) <= 4 * MAX_FEATURES
    return ForecastRecord(
        request_id,
        made_at,
        forecast.source,
        forecast.version,
        forecast.mean,
        forecast.quantiles,
        forecast.rank,
        features if fits else "",
        answer.features if fits else b"",
    )
