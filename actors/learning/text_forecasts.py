"""Serves, logs and updates the forecasts of a length predictor that has an artefact."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import Counter, Gauge

from farsight.actors.calls.log_store import LogStoreCalls
from farsight.actors.learning.length_learner import LengthLearner, ModelRegistry
from farsight.actors.learning.state_forecasts import StateForecasts
from farsight.actors.log.log_outbox import LogOutbox
from farsight.actors.runtime.component import ComponentContext
from farsight.actors.runtime.metrics import family
from farsight.actors.runtime.peer import answer_of
from farsight.core.config.learning import PredictorConfig
from farsight.core.errors import ConfigError, FarsightError
from farsight.core.forecast import Forecast, ForecastQuestion, StateQuestion
from farsight.core.messages.log import Artefact, ArtefactName, ForecastRecord, LogRecords
from farsight.core.messages.status import FORECASTS_FAIL, FORECASTS_SHED, SHED_SHOWN_S, Degraded
from farsight.predictor.applications.reading import SECRET_BYTES
from farsight.predictor.applications.start import untrained, untrained_with_encoder
from farsight.predictor.artefact import TrainedModel, load
from farsight.predictor.encoders import Encoder, Scorer
from farsight.predictor.history import HistoryPredictor
from farsight.predictor.retraining import MAX_FEATURES, can_be_retrained, feature_set
from farsight.predictor.shedding import Effort, EffortBudget
from farsight.predictor.text_predictor import TextPredictor

SECRET_KIND = "application-keys"
"""Kind of the artefact whose only version holds the secret."""

_NAME = ArtefactName(SECRET_KIND, 1)

NUM_TRIES, PAUSE_S = 10, 0.5

logger = logging.getLogger(__name__)


async def application_secret(log_store: LogStoreCalls) -> bytes:
    """Returns the secret that the log holds; the first predictor that asks writes the secret.

    While the log is unavailable, a predictor waits for some seconds and then takes a secret of its own. What this
    predictor learns is lost when it ends: the name of its features contains the name of the secret, so that these
    features are not mixed with others.
    """
    own = secrets.token_bytes(SECRET_BYTES)
    for _ in range(NUM_TRIES):
        try:
            return await _kept(log_store, own)
        except FarsightError:
            await asyncio.sleep(PAUSE_S)
    logger.warning("the log does not answer; forecasts by application begin with keys of their own")
    return own


async def _kept(log_store: LogStoreCalls, own: bytes) -> bytes:
    found = await log_store.read_artefact(_NAME)
    if found is None:
        note = "keys the hashes of instructions in the log"
        with suppress(FarsightError):  # another predictor was first: its secret is read below
            await log_store.put_artefact(Artefact(SECRET_KIND, 1, time.time(), None, 0, note, own))
        found = await log_store.read_artefact(_NAME)
    if found is None:
        raise FarsightError("the log kept no secret of application keys")
    return found.data


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


KEEP_UP_S = 5.0
"""Seconds between two searches for a newer version, by a predictor that does not learn itself."""


class TextForecasts:
    """The forecasts of one LengthPredictor; ``load`` makes it.

    Args:
        artefact: The first version.
        predictor: The predictor that serves this version.
        history: Answers when a forecast from the text would cost too much CPU time.

    Attributes:
        states: Forecasts of requests that have been prefilled.
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
        self.states = StateForecasts(log_store, _weights_name(context))
        self._server = ForecastServer(predictor, self._settings.cpu_share, context.degraded)
        append = log_store.append
        self._outbox = LogOutbox[ForecastRecord](append, lambda new: LogRecords(forecasts=new), context.degraded)
        text = "Version of the predictor that serves."
        self._version = family(context.registry, Gauge, "farsight:forecast_version", text)
        text = "Forecasts, by the predictor that made them."
        self._counter = family(context.registry, Counter, "farsight:forecasts", text, ("source",))
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
        weights = _weights_name(context)
        if settings.artefact:
            artefact, text_model = await asyncio.to_thread(_load, settings)
        else:
            if settings.encoder:
                artefact, text_model = await asyncio.to_thread(_begin_with_encoder, settings, weights)
            else:
                secret = await application_secret(log_store)
                artefact, text_model = untrained(weights, secret, settings.num_trees), None
            logger.info("no predictor.artefact: output lengths are learned from this service's own requests")
        predictor = TextPredictor(artefact, text_model, history)
        forecasts = cls(context, log_store, artefact, predictor, history)
        await forecasts._look_for_newer()
        await forecasts.states.load()
        return forecasts

    def work(self) -> list[Coroutine[Any, Any, None]]:
        """Returns the coroutines that must run as long as the predictor serves."""
        work = [self._server.run(), self._outbox.run()]
        if self._is_learner:
            work.append(self.states.run())
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

    def answer_prefilled(self, questions: Sequence[StateQuestion]) -> list[Forecast]:
        """Returns what ``StateForecasts.answer`` does."""
        made = self.states.answer(questions)
        for each in made:
            self._counter.labels(each.source).inc()
        return made

    def _use(self, artefact: TrainedModel) -> None:
        """Serves this version from the next batch on."""
        self._artefact = artefact
        predictor = TextPredictor(artefact, self._text_model, self._history)
        self._server.swap(predictor)
        self._version.set(predictor.version)

    async def _look_for_newer(self) -> None:
        newest = await answer_of(self._registry.newest(int(self._artefact.metadata["version"])))
        if newest is not None:
            self._use(newest)

    async def _keep_up(self) -> None:
        """Switches to each newer version that another predictor has learned."""
        while True:
            await asyncio.sleep(KEEP_UP_S)
            await self._look_for_newer()


def _weights_name(context: ComponentContext) -> str:
    return f"{context.config.model.name} {context.site.model_since:.0f}"


def _load(settings: PredictorConfig) -> tuple[TrainedModel, Encoder | Scorer | None]:
    from farsight.engine.encoders.regressor import text_model_of  # loads torch, which only these predictors need

    path = Path(settings.artefact)
    try:
        artefact = load(path)
        return artefact, text_model_of(artefact, settings.encoder, settings.device)
    except FarsightError as error:
        expected = f"a directory of `farsight train` ({error})"
        raise ConfigError("predictor.artefact", str(path), expected) from error


def _begin_with_encoder(settings: PredictorConfig, weights: str) -> tuple[TrainedModel, Encoder]:
    from farsight.engine.encoders.loading import load_encoder

    try:
        encoder = load_encoder(settings.encoder, settings.device)
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
