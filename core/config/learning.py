"""``[predictor]``: forecasts of output lengths."""

from __future__ import annotations

from dataclasses import dataclass

from core.config.checks import require


@dataclass(frozen=True, slots=True)
class PredictorConfig:
    """Who foresees output lengths.

    Attributes:
        artefact: What ``farsight train`` wrote; empty: the lengths of the last outputs, whatever is asked.
        device: Where an encoder runs, as torch names it.
        cpu_share: Of one core that forecasts may take; beyond it they look at less.
        wait_s: A request waits so long for its forecast before it goes its way; one that comes later follows it.
        learn: Train anew while serving, on what was foreseen badly ...
        learn_every_s: ... so often; Magnus does it every three minutes (section III-B).
    """

    artefact: str = ""
    device: str = "cpu"
    cpu_share: float = 0.05
    wait_s: float = 0.0
    learn: bool = True
    learn_every_s: float = 180.0

    def __post_init__(self) -> None:
        require(self.cpu_share > 0, "predictor.cpu_share", self.cpu_share, "a number > 0")
        require(self.wait_s >= 0, "predictor.wait_s", self.wait_s, "a number >= 0")
        require(self.learn_every_s > 0, "predictor.learn_every_s", self.learn_every_s, "a number > 0")
