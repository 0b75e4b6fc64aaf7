"""Learns how long the steps of each replica take, and how long batches take."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Gauge

from actors.calls.learning import ServingTimeEstimatorCalls
from actors.learning.batch_time_learner import BatchTimeLearner
from actors.runtime.component import Component, ComponentContext
from actors.runtime.peer import again_and_again
from core.messages.step_times import (
    BatchEstimates,
    BatchShapes,
    ReplicaStepProfile,
    ServedBatchTimes,
    StepProfileReply,
    StepSamples,
)
from estimator.step_profile import StepProfile
from policies.compose import is_batch_mode

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
        self._gauge = _gauge(context.registry)
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


@functools.cache
def _gauge(registry: CollectorRegistry) -> Gauge:
    """Makes one gauge for each registry: several estimators, each with its own replicas, may share a process."""
    return Gauge(
        "farsight:step_profile_seconds",
        "Fitted seconds of a step, and of each unit of work in it.",
        ("replica", "term"),
        registry=registry,
    )
