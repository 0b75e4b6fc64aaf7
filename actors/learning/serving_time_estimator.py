"""Learns how long the steps of each replica take."""

from __future__ import annotations

import functools
import time

from prometheus_client import CollectorRegistry, Gauge

from actors.calls.learning import ServingTimeEstimatorCalls
from actors.runtime.component import Component, ComponentContext
from core.messages.step_times import ReplicaStepProfile, StepProfileReply, StepSamples
from estimator.step_profile import StepProfile

TERMS = ("step", "prefill_token", "decode_seq", "context_token", "prefill_pair")
"""Names of the coefficients, in the order of ``StepProfile.coefficients``."""


class ServingTimeEstimator(Component, ServingTimeEstimatorCalls):
    """Keeps one step-time profile for each replica, from the samples that the Schedulers send."""

    kind = "ServingTimeEstimator"

    def __init__(self, context: ComponentContext) -> None:
        super().__init__(context)
        self._gauge = _gauge(context.registry)
        self._profiles: dict[str, StepProfile] = {}
        self._observed_at: float | None = None

    @property
    def last_step_age_s(self) -> float | None:
        return None if self._observed_at is None else time.monotonic() - self._observed_at

    async def observe(self, samples: StepSamples) -> ReplicaStepProfile | None:
        profile = self._profiles.setdefault(samples.replica, StepProfile())
        profile.observe(samples.samples)
        for term, value_s in zip(TERMS, profile.coefficients(), strict=True):
            self._gauge.labels(samples.replica, term).set(value_s)
        self._observed_at = time.monotonic()
        return None if profile.cost() is None else _row(samples.replica, profile)

    async def profile(self) -> StepProfileReply:
        return StepProfileReply(tuple(_row(name, profile) for name, profile in self._profiles.items()))


def _row(replica: str, profile: StepProfile) -> ReplicaStepProfile:
    return ReplicaStepProfile(replica, profile.num_samples, *profile.coefficients())


@functools.cache
def _gauge(registry: CollectorRegistry) -> Gauge:
    """One for each registry: several estimators may share a process, and each has its own replicas."""
    return Gauge(
        "farsight:step_profile_seconds",
        "Fitted seconds of a step, and of each unit of work in it.",
        ("replica", "term"),
        registry=registry,
    )
