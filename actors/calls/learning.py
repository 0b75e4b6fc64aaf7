"""What the learners answer."""

from __future__ import annotations

from typing import Protocol

from actors.calls.message import message
from core.forecast import Forecast
from core.messages.forecasts import ForecastQuestions, Forecasts
from core.messages.step_times import (
    BatchEstimates,
    BatchShapes,
    ReplicaStepProfile,
    ServedBatchTimes,
    StepProfileReply,
    StepSamples,
)


class LengthPredictorCalls(Protocol):
    """A LengthPredictor."""

    @message(long=True)
    async def predict(self, questions: ForecastQuestions) -> Forecasts:
        """One forecast a question; raises FarsightError where nothing was trained."""

    @message()
    async def forecast(self) -> Forecast:
        """The distribution of output lengths in the log; it never waits for the log."""


class ServingTimeEstimatorCalls(Protocol):
    """A ServingTimeEstimator."""

    @message()
    async def observe(self, samples: StepSamples) -> ReplicaStepProfile | None:
        """Measured steps of one replica; answers what its steps cost, None before enough are measured."""

    @message()
    async def profile(self) -> StepProfileReply:
        """What steps cost, by replica in the order in which they were first heard of."""

    @message()
    async def estimate_batches(self, shapes: BatchShapes) -> BatchEstimates:
        """Seconds of each of these batches (Magnus III-D)."""

    @message()
    async def observe_batches(self, batches: ServedBatchTimes) -> None:
        """Batches that have ended, to learn from."""
