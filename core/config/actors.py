"""``[actors]``: processes and where they run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from core.config.checks import require

PLACEMENTS = ("auto", "together", "fused", "split", "packed")


@dataclass(frozen=True, slots=True)
class ActorsConfig:
    """Which components run in which processes.

    Attributes:
        placement: ``split`` gives every component its own actor; ``fused`` puts Router, Schedulers, KV offload
            managers, estimator, log store and supervisor into one; ``together`` is that, and puts LengthPredictors
            there too, which only suits those that read no prompts; ``packed`` is ``fused``, and sixteen workers of
            emulated devices share a process as well; ``auto`` picks by the machine's size, by whether predictors read
            prompts, and by how many devices are emulated.
        length_predictors: Number of LengthPredictors at the start.
        max_length_predictors: Most LengthPredictors, which start while questions queue; 0: never more than at the
            start.
        serving_time_estimators: Number of ServingTimeEstimators.
        gpus_per_rank: GPUs that Ray sets aside for each process of a replica that is spread over several; negative: one
            where it computes on a GPU, else none.
        scheduler_delay_s: Delays every message to and from a Scheduler by so many seconds; to measure that no step
            waits for one.
        failing_steps: The Supervisor replaces a worker after so many failed steps in a row.
        silence_s: The Supervisor replaces a process that is stopped or hangs for so many seconds, and one that is only
            slow after ten times as long.
        step_stall_s: A worker is replaced when a step lasts longer than twenty times its expected time plus so many
            seconds.
    """

    placement: str = "auto"
    length_predictors: int = 1
    max_length_predictors: int = 0
    serving_time_estimators: int = 1
    gpus_per_rank: float = -1.0
    scheduler_delay_s: float = 0.0
    failing_steps: int = 3
    silence_s: float = 10.0
    step_stall_s: float = 60.0

    def __post_init__(self) -> None:
        require(self.placement in PLACEMENTS, "actors.placement", self.placement, f"one of {', '.join(PLACEMENTS)}")
        for name in ("length_predictors", "serving_time_estimators", "failing_steps"):
            value = getattr(self, name)
            require(value >= 1, f"actors.{name}", value, "an integer >= 1")
        for name in ("silence_s", "step_stall_s"):
            value = getattr(self, name)
            require(1 <= value < math.inf, f"actors.{name}", value, "seconds, at least 1")
        most = self.max_length_predictors
        ok = most == 0 or most >= self.length_predictors
        require(ok, "actors.max_length_predictors", most, f"0, or at least {self.length_predictors}")
        require(self.scheduler_delay_s >= 0, "actors.scheduler_delay_s", self.scheduler_delay_s, "a number >= 0")
