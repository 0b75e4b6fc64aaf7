"""Arrival times of the requests of an open loop: seconds after the beginning, not decreasing."""

from __future__ import annotations

import random
from collections.abc import Sequence


def drawn_arrivals(num_requests: int, rate: float, cv: float, seed: int) -> list[float]:
    """Arrivals whose gaps are Gamma distributed.

    Args:
        rate: Mean requests per second.
        cv: Coefficient of variation of the gaps: 1 is a Poisson process, 0 even spacing, above 1 bursts.
    """
    rng = random.Random(seed)
    now, arrivals = 0.0, []
    for _ in range(num_requests):
        now += rng.gammavariate(1 / cv**2, cv**2 / rate) if cv else 1 / rate
        arrivals.append(now)
    return arrivals


def replayed_arrivals(times: Sequence[float], rate: float | None, time_scale: float) -> list[float]:
    """The arrivals of a trace, from 0 on.

    Args:
        times: Seconds, not decreasing.
        rate: Mean requests per second that the trace is scaled to; None keeps its own rate.
        time_scale: Seconds of the run per second of the trace; used without ``rate``.
    """
    span = times[-1] - times[0] if times else 0.0
    if rate is not None:
        time_scale = (len(times) / rate) / span if span else 0.0
    return [(time - times[0]) * time_scale for time in times]
