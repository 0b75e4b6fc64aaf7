"""The texts that a scraper of Prometheus reads: the plain one, and OpenMetrics, which alone can carry exemplars."""

from __future__ import annotations

from prometheus_client import generate_latest
from prometheus_client.openmetrics import exposition as open_metrics_text
from prometheus_client.registry import Collector

PLAIN_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS_TYPE = open_metrics_text.CONTENT_TYPE_LATEST
OPEN_METRICS_END = "# EOF\n"

_OPEN_METRICS = "application/openmetrics-text"
_NAMES_AS_THEY_ARE = "allow-utf-8"
"""Any other way to write names replaces colons, which every format allows."""


def exposition(collector: Collector, *, open_metrics: bool) -> str:
    """Returns the metrics of a registry or another collector, as OpenMetrics 1.0 or in text format 0.0.4."""
    if open_metrics:
        return str(open_metrics_text.generate_latest(collector, escaping=_NAMES_AS_THEY_ARE).decode())  # type: ignore[no-untyped-call]
    return generate_latest(collector).decode()


def accepts_open_metrics(accept: str) -> bool:
    """Returns whether a scraper's ``Accept`` header names OpenMetrics, as Prometheus does where it reads that."""
    return any(part.split(";")[0].strip().lower() == _OPEN_METRICS for part in accept.split(","))
