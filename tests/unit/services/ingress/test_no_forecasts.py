"""Operators are told which presets make forecasts where the served one makes none."""

from __future__ import annotations

from core.config.learning import PredictorConfig
from core.config.load import FarsightConfig
from core.config.scheduling import SchedulerConfig
from policies.compose import forecasting_presets, predicts_requests
from policies.presets import PRESETS
from services.ingress.ingress import why_no_forecasts


def served(preset: str, **predictor: object) -> FarsightConfig:
    return FarsightConfig(scheduler=SchedulerConfig(preset=preset), predictor=PredictorConfig(**predictor))  # type: ignore[arg-type]


def test_the_presets_that_make_forecasts_are_named() -> None:
    for preset in PRESETS:
        assert bool(why_no_forecasts(served(preset))) != predicts_requests(served(preset))
    said = why_no_forecasts(served("fcfs"))
    assert said.startswith("Preset fcfs makes no forecasts")
    assert {"farsight", "magnus"} <= set(forecasting_presets()) and ", ".join(forecasting_presets()) in said


def test_a_predictor_makes_them_under_any_preset_and_a_setting_may_stop_them() -> None:
    assert why_no_forecasts(served("fcfs", artefact="trained")) == ""
    assert "predictor.from_traffic is off" in why_no_forecasts(served("farsight", from_traffic=False))
