"""Whether a request can have its tokens by when its client wants them: the front door of a server asks, and that of the
simulator."""

from __future__ import annotations

import math
from dataclasses import dataclass

from core.load_snapshot import LoadSnapshot
from core.request import Request
from policies.fleet.queue_delay import predict

LEVEL = 0.95
"""Probability with which a request that is admitted is to be in time."""


@dataclass(frozen=True, slots=True)
class MissedWish:
    """Why a request is refused.

    Attributes:
        late_s: Seconds that it would be late.
    """

    message: str
    late_s: float


def missed_wish(outlook: LoadSnapshot, request: Request, safety: float = 1.0) -> MissedWish | None:
    """The first of its wishes that a request cannot have; None where it can have all, or nothing is known.

    Args:
        safety: As of ``predict``.
    """
    predicted = predict(outlook, request, LEVEL, safety)
    if predicted is None:
        return None
    slo = request.slo
    deadline_s = math.inf if request.deadline_s is None else request.deadline_s
    wishes = (
        ("slo.ttft", "time to the first token", predicted.ttft_s, slo.ttft_s),
        ("slo.tpot", "time of each further token", predicted.tpot_s, slo.tpot_s),
        ("deadline_s", "time to the end", predicted.end_s, deadline_s),
    )
    for field, what, seconds, wanted_s in wishes:
        if seconds > wanted_s:
            return MissedWish(f"predicted {what}: {seconds:.3g} s, {field} is {wanted_s:g} s", seconds - wanted_s)
    return None
