"""Messages to the learners."""

from __future__ import annotations

from typing import Protocol

from actors.calls.message import message
from core.forecast import Forecast, ForecastQuestions, Forecasts
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
        """Returns one forecast per question; raises FarsightError if the predictor has no model or the model fails."""

    @message()
    async def forecast(self) -> Forecast:
        """Returns the distribution of output lengths in the log as last read; never waits for the log."""


class ServingTimeEstimatorCalls(Protocol):
    """A ServingTimeEstimator."""

    @message()
    async def observe(self, samples: StepSamples) -> ReplicaStepProfile | None:
        """Takes measured steps of one replica; returns the cost of its steps, None until enough are measured."""

    @message()
    async def profile(self) -> StepProfileReply:
        """Returns the step costs of each replica, in the order in which the replicas first sent steps."""

    @message()
    async def estimate_batches(self, shapes: BatchShapes) -> BatchEstimates:
        """Returns the estimated duration of each batch, in seconds (Magnus III-D)."""

    @message()
    async def observe_batches(self, batches: ServedBatchTimes) -> None:
        """Takes batches that have ended, as training examples."""
