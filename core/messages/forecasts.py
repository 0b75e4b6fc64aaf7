"""Forecasts of output lengths: ingress -> LengthPredictor -> ingress -> Router -> Scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from core.forecast import Forecast, ForecastQuestion


@dataclass(frozen=True, slots=True)
class ForecastQuestions:
    """Ingress -> LengthPredictor: asks for forecasts of these requests."""

    questions: tuple[ForecastQuestion, ...]


@dataclass(frozen=True, slots=True)
class Forecasts:
    """From the LengthPredictor: one forecast for each question, in their order."""

    forecasts: tuple[Forecast, ...]


@dataclass(frozen=True, slots=True)
class ForecastMade:
    """Ingress -> Router -> Scheduler: the forecast of an attempt that was submitted before the forecast came."""

    request_id: str
    attempt: int
    forecast: Forecast


@dataclass(frozen=True, slots=True)
class ForecastsMade:
    made: tuple[ForecastMade, ...]
