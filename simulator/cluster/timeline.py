"""The state of a fleet over time: samples at a fixed interval of virtual time, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from farsight.core.errors import InvalidValueError
from farsight.simulator.cluster.replica import Replica

SERIES = ("waiting", "running", "offloaded", "used_tokens", "predicted_tokens")
"""The samples of each replica: number of requests that wait (or are paused with KV on the device), that execute, and
whose KV is on the host; KV tokens in use; its admission's latest predicted peak (NaN if it predicts none)."""


class Timeline:
    """Samples of all replicas at 0, ``interval_s``, 2 ``interval_s`` ...

    When it is full it drops every other sample and doubles the interval. So it covers a run of any length, and after
    the first time it holds at least half of ``max_samples``. Sampling does not change the replicas.

    Args:
        interval_s: First interval between samples.
        max_samples: Even, at least 2.

    Raises:
        InvalidValueError: The interval or the bound is wrong.
    """

    def __init__(self, interval_s: float = 0.02, max_samples: int = 1024) -> None:
        if not 0 < interval_s < math.inf:
            raise InvalidValueError("interval_s", interval_s, "seconds above 0")
        if max_samples < 2 or max_samples % 2:
            raise InvalidValueError("max_samples", max_samples, "an even number >= 2")
        self.interval_s = interval_s
        self.num_samples = 0
        self._max_samples = max_samples
        self._values: npt.NDArray[np.float64] | None = None  # samples x series x replicas

    def advance(self, now: float, replicas: Sequence[Replica]) -> None:
        """Takes the samples due up to ``now``; no event lies between the last one and ``now``."""
        while (at := self.num_samples * self.interval_s) <= now:
            if self.num_samples == self._max_samples:
                self._thin_out()
            else:
                self._sample(at, replicas)

    def _sample(self, at: float, replicas: Sequence[Replica]) -> None:
        if self._values is None:
            self._values = np.empty((self._max_samples, len(SERIES), len(replicas)))
        self._values[self.num_samples] = np.array([_state(replica, at) for replica in replicas]).T
        self.num_samples += 1

    def _thin_out(self) -> None:
        assert self._values is not None
        self.num_samples = self._max_samples // 2
        self._values[: self.num_samples] = self._values[::2].copy()
        self.interval_s *= 2

    def times_s(self) -> npt.NDArray[np.float64]:
        """The instants of the samples."""
        return np.arange(self.num_samples, dtype=np.float64) * np.float64(self.interval_s)

    def series(self, name: str) -> npt.NDArray[np.float64]:
        """One of ``SERIES``: samples x replicas."""
        if self._values is None:
            return np.empty((0, 0))
        return self._values[: self.num_samples, SERIES.index(name)]


def _state(replica: Replica, at: float) -> tuple[float, float, float, float, float]:
    scheduler = replica.scheduler
    paused = scheduler.num_waiting + scheduler.num_admitted - scheduler.num_running
    offloaded = min(scheduler.num_offloaded, paused)
    predicted = getattr(scheduler.admission, "predicted_peak", math.nan)  # Few policies predict a peak.
    return paused - offloaded, scheduler.num_running, offloaded, replica.used_tokens_at(at), predicted
