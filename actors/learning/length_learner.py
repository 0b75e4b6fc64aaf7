"""Retrains the predictor of output lengths while it serves; the log store keeps the versions."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np
from prometheus_client import CollectorRegistry, Counter

from farsight.actors.calls.log_store import LogStoreCalls
from farsight.actors.runtime.metrics import family
from farsight.actors.runtime.peer import PeerLost
from farsight.core.config.learning import PredictorConfig
from farsight.core.learning import ErrorRule
from farsight.core.messages import log as log_messages
from farsight.core.messages.log import ExamplePage, LoggedExample, LogQuery
from farsight.predictor.applications.start import GROWTH
from farsight.predictor.applications.start import MAX_EXAMPLES as MAX_OWN_EXAMPLES
from farsight.predictor.artefact import ArtefactError, TrainedModel, from_bytes
from farsight.predictor.learning import MAX_EXAMPLES, ContinuousLearning, PredictionOutcome
from farsight.predictor.learning_process import FitProcess
from farsight.predictor.retraining import (
    TRAIN_FEATURES,
    Sample,
    feature_set,
    is_untrained,
    learns_from_all,
    retrain,
    retraining,
    samples_of,
    score,
)

logger = logging.getLogger(__name__)


class ModelRegistry:
    """The versions that use the same features as ``first``; other versions cannot read the logged features.

    Args:
        first: The artefact of ``farsight train``.
    """

    def __init__(self, log_store: LogStoreCalls, first: TrainedModel, registry: CollectorRegistry) -> None:
        self._log_store = log_store
        self._kind = f"length-predictor {feature_set(first)}"
        text = "Versions of a predictor that were damaged."
        self._errors = family(registry, Counter, "farsight:forecast_artefact_errors", text)
        self._broken: set[int] = set()

    async def newest(self, above: int) -> TrainedModel | None:
        """Returns the newest intact version above ``above`` and not above the current version; None if there is none.

        Raises:
            PeerLost: The log store does not answer.
        """
        infos = (await self._log_store.artefacts()).artefacts
        mine = {info.version: info.current for info in infos if info.kind == self._kind}
        current = max((version for version, is_current in mine.items() if is_current), default=0)
        for version in sorted(mine, reverse=True):
            if above < version <= current and version not in self._broken:
                artefact = await self._read(version)
                if artefact is not None:
                    return artefact
        return None

    async def _read(self, version: int) -> TrainedModel | None:
        found = await self._log_store.read_artefact(log_messages.ArtefactName(self._kind, version))
        if found is None:
            return None  # retention has dropped it meanwhile
        try:
            return from_bytes(found.data, f"version {version} of {self._kind}")
        except ArtefactError as error:
            self._broken.add(version)
            self._errors.inc()
            logger.error("%s; an earlier version serves", error)
            return None

    async def put(self, artefact: TrainedModel, score: float) -> None:
        """Stores a version and makes it the current one; repeating the call changes nothing.

        Raises:
            PeerLost: The log store does not answer.
        """
        version = int(artefact.metadata["version"])
        num_examples = int(artefact.metadata["num_examples"])
        note = "learned while serving; the score is the mean pinball loss in tokens"
        entry = log_messages.Artefact(self._kind, version, time.time(), score, num_examples, note, artefact.to_bytes())
        await self._log_store.put_artefact(entry)
        await self._log_store.set_current(log_messages.ArtefactName(self._kind, version))


LOOK_S = 2.0
"""Seconds between two reads of the log."""

POLL_S = 0.5
"""Seconds between two checks whether a fit has ended."""

PAGE = 250
"""Most examples read at once."""

FIT_TIMEOUT_S = 600.0
"""Seconds after which a fit is given up."""

_END = 2**63 - 1
"""A row number above that of any log."""


class LengthLearner:
    """Reads examples from the log; periodically fits a new version to the examples that were predicted badly.

    Args:
        current: The version that serves.
        use: Called with each version that is to serve from now on.
        settings: When a fit begins, and which requests it learns from.
    """

    def __init__(
        self,
        log_store: LogStoreCalls,
        registry: ModelRegistry,
        current: TrainedModel,
        use: Callable[[TrainedModel], None],
        settings: PredictorConfig,
    ) -> None:
        self._log_store = log_store
        self._registry = registry
        self._current = current
        self._use = use
        self._feature_set = feature_set(current)
        self._width = current.arrays[TRAIN_FEATURES].shape[1]
        self._from_all = learns_from_all(current)
        self._learning: ContinuousLearning[Sample, TrainedModel] = ContinuousLearning(
            score,
            current,
            samples_of(current),
            settings.learn_every_s,
            GROWTH if self._from_all else math.inf,
            MAX_OWN_EXAMPLES if self._from_all else MAX_EXAMPLES,
            ErrorRule(settings.learn_min_error, settings.learn_min_share),
        )
        self._row: int | None = None
        self._unsaved: tuple[TrainedModel, float] | None = None

    async def run(self) -> None:
        """Runs until cancelled. Faults of a fit or of the log are logged; the current version then stays in use."""
        while True:
            with suppress(PeerLost):  # the log store will be back
                await self._read()
                await self._save()
            examples = self._learning.begin(time.monotonic())
            if examples is not None:
                await self._fit(examples)
            await asyncio.sleep(LOOK_S)

    async def _read(self) -> None:
        if self._row is None:
            last_row = (await self._page(_END, 0)).last_row
            # The requests that ended before an untrained predictor started are its first examples.
            self._row = max(last_row - 2 * MAX_OWN_EXAMPLES, 0) if is_untrained(self._current) else last_row
        while True:
            page = await self._page(self._row, PAGE)
            self._row = page.last_row  # a log that has been replaced begins again
            self._learning.observe(outcome for each in page.examples if (outcome := self._outcome(each)) is not None)
            if not page.examples:
                return

    async def _page(self, after_row: int, limit: int) -> ExamplePage:
        return await self._log_store.read_examples(LogQuery(after_row, limit))

    def _outcome(self, example: LoggedExample) -> PredictionOutcome[Sample] | None:
        """Makes a training outcome; None if the request has no logged features or features of another set."""
        forecast, finished = example.forecast, example.finished
        if forecast.feature_set != self._feature_set or len(forecast.features) != 4 * self._width:
            return None
        features = np.frombuffer(forecast.features, np.float32)
        sample = Sample(features, finished.output_len)
        predicted = None if self._from_all else forecast.mean
        complete = ("stop", "length") if self._from_all else ("stop",)
        return PredictionOutcome(sample, predicted, finished.output_len, finished.finish_reason not in complete)

    async def _fit(self, examples: list[Sample]) -> None:
        """Fits in a niced process of its own, while serving goes on."""
        task = await asyncio.to_thread(retraining, self._current, examples)
        process = await asyncio.to_thread(FitProcess, retrain, task, time.monotonic(), FIT_TIMEOUT_S)
        try:
            while (end := process.poll(time.monotonic())) is None:  # noqa: ASYNC110 (its end wakes no waiter)
                await asyncio.sleep(POLL_S)
        finally:
            process.stop()
        if end.data is None:
            self._learning.give_up()
            logger.warning("length predictor: %s; version %s stays", end.error, self._current.metadata["version"])
            return
        artefact = await asyncio.to_thread(from_bytes, end.data, "the new version")
        verdict = await asyncio.to_thread(self._learning.judge, artefact)
        if not verdict.accepted:
            logger.info("a new version was worse (loss %.2f, not %.2f)", verdict.score, verdict.current_score)
            return
        self._current, self._unsaved = artefact, (artefact, verdict.score)
        with suppress(PeerLost):  # the next turn of ``run`` saves it
            await self._save()  # before it serves: a version that has served must outlive this process
        self._use(artefact)

    async def _save(self) -> None:
        if self._unsaved is not None:
            await self._registry.put(*self._unsaved)
            self._unsaved = None
