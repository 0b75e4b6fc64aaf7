"""Learns how long the steps of each replica take, and how long batches take."""

from __future__ import annotations

import asyncio
import importlib
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from prometheus_client import Gauge

from farsight.actors.calls.log_store import LogStoreCalls
from farsight.actors.calls.scheduling import ServingTimeEstimatorCalls
from farsight.actors.runtime.component import Component, ComponentContext
from farsight.actors.runtime.metrics import family
from farsight.actors.runtime.peer import PeerLost, again_and_again
from farsight.core.costs import StepCost
from farsight.core.errors import ConfigError, FarsightError, InvalidValueError
from farsight.core.learning import ErrorRule
from farsight.core.messages.log import Artefact, ArtefactName
from farsight.core.messages.step_times import (
    BatchEstimates,
    BatchShape,
    BatchShapes,
    ReplicaStepProfile,
    ServedBatchTime,
    ServedBatchTimes,
    StepProfileReply,
    StepSamples,
)
from farsight.estimator.knn import MIN_BATCHES, BatchLearning, BatchTimes, ServedBatch, read_batch_times
from farsight.estimator.profile_file import known_cost
from farsight.estimator.step_profile import StepProfile
from farsight.policies.compose import is_batch_mode
from farsight.policies.settings import PRIOR_COST

KIND = "batch-times"
"""Kind of the artefact."""

LOOK_S = 2.0
"""Seconds between two checks whether learning is due."""

NUM_SCORED = 200
"""Number of estimates whose mean error is a version's score."""

logger = logging.getLogger(__name__)


class BatchTimeLearner:
    """Feeds a ``BatchTimes`` with step costs and ended batches, and keeps its versions in the log store.

    Every ServingTimeEstimator hears of every batch and learns by itself. The first estimator stores each version that
    has learned something, and a later process continues from that version.

    Raises:
        ConfigError: The artefact that the configuration names cannot be read.
    """

    def __init__(self, context: ComponentContext) -> None:
        settings = context.config.batch
        self._log_store: LogStoreCalls = context.peers.log_store()
        rule = ErrorRule(settings.learn_min_error_s, settings.learn_min_share)
        self._how = BatchLearning(settings.knn_neighbours, settings.learn_every_s, rule)
        self._stores = context.index == "0"
        # A replica that has seen no step answers by the device's own profile where that is known.
        self._cost = known_cost(context.config.engine.profile, PRIOR_COST)
        self._times = _trained(settings.artefact, self._cost, self._how)
        self._errors_s: deque[float] = deque(maxlen=NUM_SCORED)
        self._num_observed = 0
        self._unsaved = False

    def price(self, cost: StepCost) -> None:
        """Takes a newly measured cost of steps."""
        self._cost = cost
        self._times.price(cost)

    def estimates_s(self, shapes: Sequence[BatchShape]) -> list[float]:
        """Returns the estimated seconds of each batch."""
        return self._times.estimates_s([(each.num_requests, each.batch_len, each.generation_len) for each in shapes])

    def ended(self, batch: ServedBatchTime) -> None:
        """Takes a batch that has run to its end as an example."""
        shape = batch.shape
        try:
            served = ServedBatch(shape.num_requests, shape.batch_len, shape.generation_len, batch.duration_s)
        except InvalidValueError:
            return  # the batch generated nothing
        self._times.observe(served)
        self._num_observed += 1
        self._errors_s.append(abs(batch.estimated_s - batch.duration_s))

    async def run(self) -> None:
        """Learns until cancelled. While the log store is away nothing is lost: a later version holds all of it."""
        is_loaded = await self._load()
        while True:
            await asyncio.sleep(LOOK_S)
            is_loaded = is_loaded or await self._load()
            if is_loaded:
                await self._learn()

    async def _load(self) -> bool:
        """Loads what an earlier process has learned; returns False while the log store does not answer."""
        try:
            artefact = await self._log_store.read_artefact(ArtefactName(KIND))
        except FarsightError:
            return False  # the log store is not there, or has not opened its file yet
        if artefact is not None:
            try:
                times = await asyncio.to_thread(BatchTimes.from_bytes, artefact.data, self._cost, self._how)
            except InvalidValueError as error:
                logger.error("version %d of %s cannot be read, learning starts over: %s", artefact.version, KIND, error)
            else:
                times.price(self._cost)
                for batch in self._times.unlearned:
                    times.observe(batch)
                self._times = times
        return True

    async def _learn(self) -> None:
        if self._num_observed + self._times.num_batches >= MIN_BATCHES:
            await asyncio.to_thread(importlib.import_module, "sklearn.neighbors")  # half a second, once
        self._unsaved |= self._times.learn(time.monotonic()) > 0
        if self._unsaved and self._stores:
            await self._save()

    async def _save(self) -> None:
        """Stores what is known as the next version and makes that version current."""
        score = sum(self._errors_s) / len(self._errors_s) if self._errors_s else None
        note = "learned while serving; the score is the mean error of the estimates before, in seconds"
        try:
            kept = (await self._log_store.artefacts()).artefacts
            version = max((info.version for info in kept if info.kind == KIND), default=0) + 1
            data = self._times.to_bytes()
            artefact = Artefact(KIND, version, time.time(), score, self._times.num_batches, note, data)
            await self._log_store.put_artefact(artefact)
            await self._log_store.set_current(ArtefactName(KIND, version))
        except PeerLost:
            return  # the log store will be back
        except FarsightError:
            logger.exception("%s could not be stored", KIND)
            return
        self._unsaved = False


def _trained(directory: str, cost: StepCost, learning: BatchLearning) -> BatchTimes:
    """Loads what ``farsight train --estimator`` has learned; without a directory, starts from no batch."""
    if not directory:
        return BatchTimes(cost, learning=learning)
    try:
        return read_batch_times(Path(directory), cost, learning)
    except (FarsightError, OSError) as error:
        expected = f"a directory of `farsight train --estimator` ({error})"
        raise ConfigError("batch.artefact", directory, expected) from error


PAUSE_S = 2.0
"""Seconds of pause after a fault in learning; estimates are answered meanwhile."""

TERMS = ("step", "prefill_token", "decode_seq", "context_token", "prefill_pair")
"""Names of the coefficients, in the order of ``StepProfile.coefficients``."""


class ServingTimeEstimator(Component, ServingTimeEstimatorCalls):
    """Keeps one step-time profile for each replica, and in batch mode the nearest neighbours of Magnus.

    The Schedulers send samples of steps; the Batcher sends batches that have ended.
    """

    kind = "ServingTimeEstimator"

    def __init__(self, context: ComponentContext) -> None:
        super().__init__(context)
        text = "Fitted seconds of a step, and of each unit of work in it."
        self._gauge = family(context.registry, Gauge, "farsight:step_profile_seconds", text, ("replica", "term"))
        self._profiles: dict[str, StepProfile] = {}
        self._observed_at: float | None = None
        self._batches = BatchTimeLearner(context)
        self._num_samples = self._num_estimates = 0

    async def start(self) -> None:
        if is_batch_mode(self.context.config.scheduler.preset):
            self.spawn(again_and_again(self._batches.run, PAUSE_S))

    @property
    def last_step_age_s(self) -> float | None:
        return None if self._observed_at is None else time.monotonic() - self._observed_at

    @property
    def work_done(self) -> Mapping[str, float]:
        return {"step samples": self._num_samples, "batches estimated": self._num_estimates}

    async def observe(self, samples: StepSamples) -> ReplicaStepProfile | None:
        profile = self._profiles.setdefault(samples.replica, StepProfile())
        profile.observe(samples.samples)
        for term, value_s in zip(TERMS, profile.coefficients(), strict=True):
            self._gauge.labels(samples.replica, term).set(value_s)
        self._observed_at = time.monotonic()
        self._num_samples += len(samples.samples)
        terms = {f"{term}_s": round(value_s, 9) for term, value_s in zip(TERMS, profile.coefficients(), strict=True)}
        self.note("steps_fitted", replica=samples.replica, num_samples=profile.num_samples, **terms)
        best = max(self._profiles.values(), key=lambda each: each.num_samples)
        if (cost := best.cost()) is not None:
            self._batches.price(cost)
        return None if profile.cost() is None else _row(samples.replica, profile)

    async def profile(self) -> StepProfileReply:
        return StepProfileReply(tuple(_row(name, profile) for name, profile in self._profiles.items()))

    async def estimate_batches(self, shapes: BatchShapes) -> BatchEstimates:
        self._num_estimates += len(shapes.shapes)
        return BatchEstimates(tuple(self._batches.estimates_s(shapes.shapes)))

    async def observe_batches(self, batches: ServedBatchTimes) -> None:
        for batch in batches.batches:
            self._batches.ended(batch)


def _row(replica: str, profile: StepProfile) -> ReplicaStepProfile:
    return ReplicaStepProfile(replica, profile.num_samples, *profile.coefficients())
