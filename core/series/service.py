"""The history of a service: the last 15 minutes by the second, the last 24 hours by the minute.

A pure component: its owner says what time it is. Ingress replicas report counts since their start, so that a
report that comes twice, or late, counts once.
"""

from __future__ import annotations

import dataclasses
import math
from array import array
from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from farsight.core.messages.live import ForecastTally
from farsight.core.messages.series import SeriesColumn, SeriesQuery, SeriesReply, TrafficCounts
from farsight.core.messages.tenants import TenantUsage
from farsight.core.series.tally import BucketCounts, add_counts, more_since, percentile_s

SECONDS = 900
MINUTES = 1440
MINUTE_S = 60.0

MAX_TENANTS = 12
"""Tenants with a line of their own; later ones share ``OTHERS``."""

OTHERS = "others"
TENANT = "tenant "
"""Begins the name of a column with the GPU-seconds a second of a tenant."""

FORGET_S = 3600.0
"""Seconds without a report after which an ingress replica has ended; its counts are forgotten then."""

LEVELS = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
DURATIONS = ("ttft", "itl", "jct")
FORECASTS = tuple(field.name for field in dataclasses.fields(ForecastTally))
"""Columns ``forecast_...``: what came of forecasts a second. Their ratios are errors and shares, over any span."""

RATES = (
    *("prompt_tokens", "output_tokens", "ended", "failed", "abandoned", "rejected", "moved_bytes", "gpu_s"),
    *(f"forecast_{name}" for name in FORECASTS),
)
GAUGES = ("running", "waiting", "kv_used", "kv_peak", "queue_delay_s")
PEAKS = ("kv_peak",)
"""Gauges of which a minute keeps the highest value, not the mean."""

COLUMNS = (*GAUGES, *RATES, *(f"{name}_{level}" for name in DURATIONS for level in LEVELS))

Name = TypeVar("Name", bound=Hashable)


class Ring(Generic[Name]):
    """The last ``capacity`` points, of columns that may come and go: 4 bytes a value and 8 a point, taken at once.

    Args:
        names: The first columns.
    """

    def __init__(self, capacity: int, names: Iterable[Name] = ()) -> None:
        self.capacity = capacity
        self._at = array("d", bytes(8 * capacity))
        self._columns: dict[Name, array[float]] = {}
        self._num_added = 0
        for name in names:
            self.open(name)

    def open(self, name: Name) -> None:
        """Adds a column without values so far."""
        self._columns[name] = array("f", [math.nan]) * self.capacity

    def drop(self, name: Name) -> None:
        """Removes a column."""
        del self._columns[name]

    def add(self, at: float, values: Mapping[Name, float | None]) -> None:
        """Adds a point; a column that ``values`` lacks has no value there.

        Args:
            at: Seconds, later than those of the point before.
        """
        index = self._num_added % self.capacity
        self._at[index] = at
        for name, column in self._columns.items():
            value = values.get(name)
            column[index] = math.nan if value is None else value
        self._num_added += 1

    def after(self, at: float) -> list[int]:
        """Returns the places of the points later than ``at``, oldest first."""
        oldest = max(0, self._num_added - self.capacity)
        places = (number % self.capacity for number in range(oldest, self._num_added))
        return [place for place in places if self._at[place] > at]

    def instants(self, places: Iterable[int]) -> tuple[float, ...]:
        """Returns the instants of points, in seconds."""
        return tuple(self._at[place] for place in places)

    def values(self, name: Name, places: Iterable[int]) -> tuple[float | None, ...]:
        """Returns the values of a column; None where a point has none."""
        column = self._columns[name]
        return tuple(None if math.isnan(column[place]) else column[place] for place in places)


@dataclass(slots=True)
class Instant:
    """Values at the end of a second.

    Attributes:
        kv_used, kv_peak: Share of the KV pools in use, and the predicted highest share; None without a pool.
        moved_bytes: KV copied between device and host since the workers began.
        forecasts: By replica, since its Scheduler began.
        prompt_tokens: The same: prompt tokens computed or found cached.
        gpu_s: The same: GPU-seconds of requests.
        tenants: Sums over all ingress replicas.
    """

    running: int = 0
    waiting: int = 0
    kv_used: float | None = None
    kv_peak: float | None = None
    queue_delay_s: float | None = None
    moved_bytes: int = 0
    forecasts: Mapping[str, ForecastTally] = field(default_factory=dict)
    prompt_tokens: Mapping[str, int] = field(default_factory=dict)
    gpu_s: Mapping[str, float] = field(default_factory=dict)
    tenants: tuple[TenantUsage, ...] = ()


@dataclass(slots=True)
class _Span:
    """Events and values since the last point was written."""

    counts: dict[str, float] = field(default_factory=dict)
    durations: dict[str, dict[int, int]] = field(default_factory=lambda: {name: {} for name in DURATIONS})
    gauges: dict[str, list[float]] = field(default_factory=dict)

    def count(self, name: str, more: float) -> None:
        self.counts[name] = self.counts.get(name, 0.0) + more

    def join(self, other: _Span) -> None:
        for name, more in other.counts.items():
            self.count(name, more)
        for name, counts in other.durations.items():
            add_counts(self.durations[name], counts.items())
        for name, values in other.gauges.items():
            self.gauges.setdefault(name, []).extend(values)

    def point(self, span_s: float, rates: Iterable[str]) -> dict[str, float | None]:
        values: dict[str, float | None] = {name: self.counts.get(name, 0.0) / span_s for name in rates}
        for name, seen in self.gauges.items():
            values[name] = max(seen) if name in PEAKS else sum(seen) / len(seen)
        for name, counts in self.durations.items():
            for label, level in LEVELS.items():
                values[f"{name}_{label}"] = percentile_s(counts, level)
        return values


class ServiceSeries:
    """See the module. ``report`` whenever counts come, ``tick`` once a second."""

    def __init__(self) -> None:
        self._seconds, self._minutes = Ring(SECONDS, COLUMNS), Ring(MINUTES, COLUMNS)
        self._rates = [*RATES]  # and behind them one for each line of tenants
        self._last: dict[str, tuple[TrafficCounts, float]] = {}
        self._tenants_gpu_s: dict[str, float] | None = None
        self._tenant_rejections: int | None = None
        self._moved: int | None = None
        self._forecasts: dict[str, ForecastTally] = {}
        self._sums: dict[str, dict[str, float]] = {"prompt_tokens": {}, "gpu_s": {}}  # by replica, as last told
        self._second, self._minute = _Span(), _Span()
        self._ttft: deque[tuple[float, BucketCounts]] = deque(maxlen=MINUTES)  # when each minute ended, its counts
        self._ticked_at: float | None = None
        self._minute_began: float | None = None

    def report(self, counts: TrafficCounts, now: float) -> None:
        """Takes the counts of one ingress replica. Its first report only starts the comparison with later ones."""
        before = self._last.get(counts.ingress_id)
        self._last[counts.ingress_id] = counts, now
        if before is None:
            return
        known = before[0]
        for name in ("output_tokens", "ended", "failed", "abandoned", "rejected"):
            self._second.count(name, max(0, getattr(counts, name) - getattr(known, name)))
        self._second.count("prompt_tokens", max(0, counts.outside_tokens - known.outside_tokens))
        for name in DURATIONS:
            add_counts(self._second.durations[name], more_since(getattr(counts, name), getattr(known, name)))

    def tick(self, instant: Instant, now: float) -> None:
        """Ends a second. ``now`` is in seconds since the epoch; an instant that is not later is left out."""
        if self._ticked_at is not None and now <= self._ticked_at:
            return
        span_s = 1.0 if self._ticked_at is None else now - self._ticked_at
        self._ticked_at = now
        self._take(instant)
        self._seconds.add(now, self._second.point(span_s, self._rates))
        self._minute.join(self._second)
        self._second = _Span()
        if self._minute_began is None:
            self._minute_began = now - span_s
        if now // MINUTE_S > self._minute_began // MINUTE_S:
            self._minutes.add(now, self._minute.point(now - self._minute_began, self._rates))
            self._ttft.append((now, tuple(self._minute.durations["ttft"].items())))
            self._minute, self._minute_began = _Span(), now
        for ingress_id in [name for name, (_, at) in self._last.items() if now - at > FORGET_S]:
            del self._last[ingress_id]

    def since(self, query: SeriesQuery) -> SeriesReply:
        """Returns the points that the query asks for."""
        ring = self._minutes if query.by_minute else self._seconds
        places = ring.after(query.after)
        columns = tuple(SeriesColumn(name, ring.values(name, places)) for name in COLUMNS)
        lines = self._rates[len(RATES) :]
        tenants = (SeriesColumn(name.removeprefix(TENANT), ring.values(name, places)) for name in lines)
        return SeriesReply(ring.instants(places), columns, tuple(tenants), self._ttft_over(query.span_s))

    def _ttft_over(self, span_s: float) -> tuple[float | None, ...]:
        if not span_s:
            return ()
        begin = (self._ticked_at or 0.0) - span_s
        counts: dict[int, int] = {}
        for span in (self._second, self._minute):
            add_counts(counts, span.durations["ttft"].items())
        for ended_at, known in self._ttft:
            if ended_at > begin:
                add_counts(counts, known)
        return tuple(percentile_s(counts, level) for level in LEVELS.values())

    def _take(self, instant: Instant) -> None:
        for name in GAUGES:
            value = getattr(instant, name)
            if value is not None:
                self._second.gauges[name] = [float(value)]
        if self._moved is not None:
            self._second.count("moved_bytes", max(0, instant.moved_bytes - self._moved))  # a new worker counts from 0
        self._moved = instant.moved_bytes
        for replica, tally in instant.forecasts.items():
            self._take_forecasts(replica, tally)
        for name, before in self._sums.items():
            for replica, told in getattr(instant, name).items():
                self._second.count(name, max(0.0, told - before.get(replica, told)))  # a new process counts from 0
                before[replica] = told
        rejected = sum(tenant.rejected for tenant in instant.tenants)
        if self._tenant_rejections is not None:
            self._second.count("rejected", max(0, rejected - self._tenant_rejections))
        self._tenant_rejections = rejected
        gpu_s = {tenant.tenant: tenant.gpu_s for tenant in instant.tenants}
        if self._tenants_gpu_s is not None:
            for name, sum_s in gpu_s.items():
                self._second.count(self._line_of(name), max(0.0, sum_s - self._tenants_gpu_s.get(name, 0.0)))
        self._tenants_gpu_s = gpu_s

    def _take_forecasts(self, replica: str, tally: ForecastTally) -> None:
        """Counts a replica's forecasts since its last tally; the first tally, also after a restart, counts none."""
        before = self._forecasts.get(replica)
        self._forecasts[replica] = tally
        if before is None or tally.num_requests < before.num_requests:
            return
        for name in FORECASTS:
            self._second.count(f"forecast_{name}", getattr(tally, name) - getattr(before, name))

    def _line_of(self, tenant: str) -> str:
        line = TENANT + tenant
        if line not in self._rates and len(self._rates) >= len(RATES) + MAX_TENANTS:
            line = TENANT + OTHERS
        if line not in self._rates:
            self._rates.append(line)
            for ring in (self._seconds, self._minutes):
                ring.open(line)
        return line
