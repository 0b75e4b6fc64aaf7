"""Promises while the load changes."""

from __future__ import annotations

import math

import pytest

from core.costs import StepCost
from core.forecast import QUANTILES, Forecast
from policies.interfaces import Job
from policies.outlook.calibration import OnlineCalibration
from policies.outlook.promises import PromiseMaker, Standing

COST = StepCost(0.01, 0.0005, 0.01, 0.0)
PLACES = 16


def job(name: str) -> Job:
    forecast = Forecast(50.0, (50.0,) * len(QUANTILES), 1, "test", 1)
    return Job(name, 0.0, 20, 400, 0, math.inf, forecast)


@pytest.mark.parametrize("pause_s", [60.0, 600.0])
def test_after_a_burst_a_request_alone_is_told_what_it_takes_alone(pause_s: float) -> None:
    """It takes about 1 s; beside sixteen others it takes 8.5 s, and longer while their prompts are computed."""
    maker, beside = PromiseMaker(PLACES), [job(f"r{number}") for number in range(PLACES)]
    burst = [job(f"b{number}") for number in range(200)]
    for number, each in enumerate(burst):
        maker.promise([each], Standing(beside, [], 0), COST, 0.02 * number)
    for each in burst:
        each.output_len = 50
        maker.ended(each, 13.0, censored=False)
    maker.calibration = OnlineCalibration()
    alone = job("alone")
    (told,) = maker.promise([alone], Standing([alone], [], 0), COST, 13.0 + pause_s)
    assert 1.0 < told.p50_s < 2.0, "the past burst counts no more"
