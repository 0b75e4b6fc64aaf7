"""What the simulator says about the same arrivals."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from services.demo.settings import DemoSettings
from simulator.run import run
from simulator.traffic.workload import SimRequest


def simulated_ratio(settings: DemoSettings, arrivals: Sequence[SimRequest]) -> float:
    """Mean completion time under the second preset divided by that under the first."""
    first, second = (
        fmean(record.jct_s for record in run(settings.experiment(preset), arrivals).recorder.done)
        for preset in settings.presets
    )
    return second / first
