"""Forecasts of output lengths: ingress -> LengthPredictor -> ingress -> Router -> Scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from core.forecast import Forecast, ForecastQuestion


@dataclass(frozen=True, slots=True)
class ForecastQuestions:
    """Ingress -> LengthPredictor: how long will these be?"""

    questions: tuple[ForecastQuestion, ...]


@dataclass(frozen=True, slots=True)
class Forecasts:
    """LengthPredictor ->: one for each question, in their order."""

    forecasts: tuple[Forecast, ...]


@dataclass(frozen=True, slots=True)
class ForecastMade:
    """Ingress -> Router -> Scheduler: what has been foreseen of an attempt that is on its way already."""

    request_id: str
    attempt: int
    forecast: Forecast


@dataclass(frozen=True, slots=True)
class ForecastsMade:
    made: tuple[ForecastMade, ...]
