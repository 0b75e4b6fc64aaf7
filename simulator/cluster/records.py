"""Records of each request and of all replicas together, and samples of their state over time."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from farsight.core.errors import InvalidValueError
from farsight.core.messages.requests import Promise
from farsight.simulator.traffic.workload import SimRequest

if TYPE_CHECKING:
    from farsight.simulator.cluster.replica import Replica

_BINS_PER_E = 100
"""Bins of the histogram of inter-token latencies for each factor of e: each is 1 % wide."""


@dataclass(slots=True)
class Record:
    """The life of one request; instants in seconds from the start, NaN until they occur.

    Attributes:
        max_gap_s: Longest time between two of its tokens (MTPOT).
        late_s: Seconds that its reader has waited for tokens, from the first one on; 0 where no one reads.
        num_evictions: Number of times its KV was dropped.
        num_swaps: Number of times its KV was moved to the host.
        promise: As told on arrival at its replica; None where none was made.
    """

    arrival: SimRequest
    replica: str = ""
    first_token_at: float = math.nan
    last_token_at: float = math.nan
    finished_at: float = math.nan
    max_gap_s: float = 0.0
    late_s: float = 0.0
    num_tokens: int = 0
    num_evictions: int = 0
    num_swaps: int = 0
    cached_len: int = 0
    promise: Promise | None = None

    @classmethod
    def of(cls, arrival: SimRequest) -> Record:
        """The record of a request that comes; tokens that it has count as its first and latest so far."""
        at = arrival.arrived_at if arrival.generated else math.nan
        return cls(arrival, first_token_at=at, last_token_at=at, num_tokens=arrival.generated)

    @property
    def jct_s(self) -> float:
        return self.finished_at - self.arrival.arrived_at

    @property
    def ttft_s(self) -> float:
        return self.first_token_at - self.arrival.arrived_at

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first; NaN for a single token."""
        gaps = self.num_tokens - 1
        return (self.last_token_at - self.first_token_at) / gaps if gaps else math.nan


@dataclass(slots=True)
class ReplicaUsage:
    """KV memory of one replica, weighted by its decoding steps.

    Attributes:
        num_output_tokens: Output tokens computed, invalid ones of padded batches included.
        num_prompt_tokens: Prompt tokens computed, padding and steps that were cut off included.
        token_steps: Sum over steps of the KV tokens in use.
    """

    num_steps: int = 0
    num_sequence_steps: int = 0
    num_output_tokens: int = 0
    token_steps: float = 0.0
    busy_s: float = 0.0
    num_prompt_tokens: int = 0
    peak_tokens: int = 0


@dataclass(slots=True)
class Recorder:
    """All records of a run."""

    done: list[Record] = field(default_factory=list)
    usage: dict[str, ReplicaUsage] = field(default_factory=dict)
    gaps: Counter[int] = field(default_factory=Counter)

    def tokens(self, record: Record, num_tokens: int, first_s: float, rest_s: float, at: float) -> None:
        """Records tokens of one request.

        Args:
            first_s: Seconds until the first of them.
            rest_s: Seconds of each of the others, at most of the longest.
            at: Instant of the last one.
        """
        if record.num_tokens == 0:
            record.first_token_at = first_s
        else:
            gap = first_s - record.last_token_at
            if gap > record.max_gap_s:
                record.max_gap_s = gap
            self.gaps[_bin(gap)] += 1
        if num_tokens > 1:
            if rest_s > record.max_gap_s:
                record.max_gap_s = rest_s
            self.gaps[_bin(rest_s)] += num_tokens - 1
        record.num_tokens += num_tokens
        record.last_token_at = at
        rate = record.arrival.reading_rate
        if rate:  # of evenly spaced tokens the first or the last is the latest
            read_s = (record.num_tokens - num_tokens) / rate, (record.num_tokens - 1) / rate
            late_s = max(first_s - read_s[0], at - read_s[1]) - record.first_token_at
            if late_s > record.late_s:
                record.late_s = late_s

    def itl_s(self, share: float) -> float:
        """The inter-token latency that this share of all gaps does not exceed, with 1 % accuracy."""
        left = share * sum(self.gaps.values())
        for index in sorted(self.gaps):
            left -= self.gaps[index]
            if left <= 0:
                return math.exp(index / _BINS_PER_E)
        return math.nan


@functools.lru_cache(maxsize=64)  # sequences of one run have the same gaps
def _bin(gap_s: float) -> int:
    return round(math.log(max(gap_s, 1e-9)) * _BINS_PER_E)


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
