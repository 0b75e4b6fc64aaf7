"""Whether a request can have its tokens by when its client wants them: the front door of a server asks, and that of the
simulator."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from core.load_snapshot import LoadSnapshot
from core.request import Request
from policies.fleet.queue_delay import Prediction, predict

LEVEL = 0.95
"""Probability with which a request that is admitted is to be in time."""

WINDOW = 200
"""Waits of late from which the errors of predictions are taken ..."""

MIN_WAITS = 20
"""... if there are so many."""


class WaitErrors:
    """The factor of predicted times to the first token: the ``LEVEL`` quantile of what those of late should have been
    multiplied by (as ``policies.outlook.calibration`` does for ends)."""

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=WINDOW)
        self.factor = 1.0

    def add(self, predicted_s: float, waited_s: float) -> None:
        """A request had its first token; O(WINDOW)."""
        self._ratios.append(waited_s / predicted_s)
        if len(self._ratios) >= MIN_WAITS:
            self.factor = float(np.quantile(self._ratios, LEVEL))


@dataclass(frozen=True, slots=True)
class MissedTarget:
    """Why a request is refused.

    Attributes:
        late_s: Seconds that it would be late.
    """

    message: str
    late_s: float


def missed_target(request: Request, predicted: Prediction) -> MissedTarget | None:
    """The first of its targets that a request cannot have; None where it can have all."""
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
    """Whether requests can have their targets, by what is predicted and how that held of late.

    Attributes:
        errors: How the predictions held.
    """

    def __init__(self) -> None:
        self.errors = WaitErrors()

    def look(self, outlook: LoadSnapshot, request: Request) -> tuple[MissedTarget | None, float]:
        """The target that it cannot have, and its predicted time to the first token, raw; 0 if none is known."""
        raw = predict(outlook, request, LEVEL)
        if raw is None:
            return None, 0.0
        return missed_target(request, raw.later(self.errors.factor)), raw.ttft_s
