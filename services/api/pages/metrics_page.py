"""Merges the metrics of several processes into one page, as OpenMetrics or in Prometheus' text format 0.0.4."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics_families
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from farsight.core.exposition import OPEN_METRICS_END, exposition

HOST_LABEL = "piece_host"
"""The label that names the process where two processes expose the same series."""

_SUMMED = frozenset({"counter", "histogram"})
_CREATED = "_created"
_HIDDEN = ("python_", "process_")
"""Metrics of the interpreter, not of the service; merged from many processes they would mean nothing."""

_Series = tuple[str, tuple[tuple[str, str], ...]]
"""Sample name and sorted labels."""


@dataclass(slots=True)
class _Merged:
    """A family, its values by series and process, and the latest exemplar of each series."""

    name: str
    text: str
    type: str
    values: dict[_Series, dict[str, float]] = field(default_factory=dict)
    exemplars: dict[_Series, Exemplar] = field(default_factory=dict)

    def metric(self) -> Metric:
        metric = Metric(self.name, self.text, self.type)
        for (name, labels), by_process in self.values.items():
            if self.type in _SUMMED:
                exemplar = self.exemplars.get((name, labels))
                metric.add_sample(name, dict(labels), sum(by_process.values()), exemplar=exemplar)
            elif len(by_process) == 1:
                metric.add_sample(name, dict(labels), next(iter(by_process.values())))
            else:
                for process, value in by_process.items():
                    metric.add_sample(name, {**dict(labels), HOST_LABEL: process}, value)
        return metric


@dataclass(frozen=True, slots=True)
class _Families(Collector):
    """A collector for the writer of ``prometheus_client``."""

    families: Iterable[_Merged]

    def collect(self) -> Iterator[Metric]:
        return (family.metric() for family in self.families)


def merge_expositions(texts: Mapping[str, str], *, open_metrics: bool = False) -> str:
    """One valid exposition with every family once.

    Counters and histograms of the same name and labels are summed, so a scraper sees one series for all ingress
    processes. Metrics of other types keep each value, with the label ``piece_host`` where two processes expose the same
    series. ``python_*``, ``process_*`` and the creation times of summed series are left out. From several exemplars of
    one series the latest stays.

    Args:
        texts: The expositions by process name, each in either format. Histograms of one name must have the same
            buckets.
        open_metrics: Whether the page is OpenMetrics.

    Raises:
        ValueError: A text cannot be parsed, or two processes give a family different types; the message names the
            process.
    """
    merged: dict[str, _Merged] = {}
    for process, text in texts.items():
        for family in _parse(process, text):
            _add(merged, process, family)
    shown = [family for family in merged.values() if not _is_hidden(family, merged)]
    return exposition(_Families(shown), open_metrics=open_metrics)


def _parse(process: str, text: str) -> list[Metric]:
    read = open_metrics_families if text.endswith(OPEN_METRICS_END) else text_string_to_metric_families
    try:
        return list(read(text))
    except ValueError as error:
        raise ValueError(f"the metrics of {process} cannot be read: {error}") from error


def _add(merged: dict[str, _Merged], process: str, family: Metric) -> None:
    target = merged.setdefault(family.name, _Merged(family.name, family.documentation, family.type))
    if target.type != family.type:
        raise ValueError(f"the metrics of {process} have {family.name} as {family.type}, others as {target.type}")
    for sample in family.samples:
        if family.type in _SUMMED and sample.name.endswith(_CREATED):
            continue  # OpenMetrics has it in the family itself
        series = (sample.name, tuple(sorted(sample.labels.items())))
        target.values.setdefault(series, {})[process] = sample.value
        known = target.exemplars.get(series)
        if sample.exemplar is not None and (known is None or _time(sample.exemplar) >= _time(known)):
            target.exemplars[series] = sample.exemplar


def _time(exemplar: Exemplar) -> float:
    return float(exemplar.timestamp or 0.0)


def _is_hidden(family: _Merged, merged: Mapping[str, _Merged]) -> bool:
    base = merged.get(family.name.removesuffix(_CREATED))
    begins_a_sum = base is not None and base is not family and base.type in _SUMMED
    return begins_a_sum or family.name.startswith(_HIDDEN)
