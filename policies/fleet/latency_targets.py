"""Decides whether a request can meet its client's latency targets; asked by the front doors of a server and of the
simulator."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from core.messages.requests import LoadSnapshot
from core.request import Request
from policies.fleet.queue_delay import Prediction, predict

LEVEL = 0.95
"""Probability with which an admitted request is to meet its targets."""

WINDOW = 200
"""Most recent waits from which the errors of predictions are taken."""

MIN_WAITS = 20
"""Fewest waits from which the errors of predictions are taken."""


class WaitErrors:
    """The correction factor of predicted times to the first token: the ``LEVEL`` quantile of recent ratios of the real
    to the predicted time (as ``policies.outlook.calibration`` does for ends)."""

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=WINDOW)
        self.factor = 1.0

    def add(self, predicted_s: float, waited_s: float) -> None:
        """Records a request's predicted and real time to its first token, in seconds. O(WINDOW)."""
        self._ratios.append(waited_s / predicted_s)
        if len(self._ratios) >= MIN_WAITS:
            self.factor = float(np.quantile(self._ratios, LEVEL))


@dataclass(frozen=True, slots=True)
class MissedTarget:
    """Why a request is refused.

    Attributes:
        late_s: Seconds by which the request would be late.
    """

    message: str
    late_s: float


def missed_target(request: Request, predicted: Prediction) -> MissedTarget | None:
    """Returns the first target that a request cannot meet; None if the request can meet all."""
    slo = request.slo
    deadline_s = math.inf if request.deadline_s is None else request.deadline_s
    targets = (
        ("slo.ttft", "time to the first token", predicted.ttft_s, slo.ttft_s),
        ("slo.tpot", "time of each further token", predicted.tpot_s, slo.tpot_s),
        ("deadline_s", "time to the end", predicted.end_s, deadline_s),
    )
    for field, what, seconds, wanted_s in targets:
        if seconds > wanted_s:
            return MissedTarget(f"predicted {what}: {seconds:.3g} s, {field} is {wanted_s:g} s", seconds - wanted_s)
    return None


class TargetCheck:
    """Decides whether requests can meet their targets, by predictions corrected by their recent errors.

    Attributes:
        errors: Recent errors of the predictions.
    """

    def __init__(self) -> None:
        self.errors = WaitErrors()

    def look(self, outlook: LoadSnapshot, request: Request) -> tuple[MissedTarget | None, float]:
        """Returns the target that cannot be met, and the uncorrected seconds to the first token; 0 if unknown."""
        raw = predict(outlook, request, LEVEL)
        if raw is None:
            return None, 0.0
        return missed_target(request, raw.later(self.errors.factor)), raw.ttft_s
