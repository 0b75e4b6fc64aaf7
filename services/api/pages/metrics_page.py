"""Merges the metrics of several processes into one page, in Prometheus' text format 0.0.4."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

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
    """A family and its values by series and process."""

    name: str
    text: str
    type: str
    values: dict[_Series, dict[str, float]] = field(default_factory=dict)

    def metric(self) -> Metric:
        metric = Metric(self.name, self.text, self.type)
        for (name, labels), by_process in self.values.items():
            if self.type in _SUMMED:
                metric.add_sample(name, dict(labels), sum(by_process.values()))
            elif len(by_process) == 1:
                metric.add_sample(name, dict(labels), next(iter(by_process.values())))
            else:
                for process, value in by_process.items():
                    metric.add_sample(name, {**dict(labels), HOST_LABEL: process}, value)
        return metric


@dataclass(frozen=True, slots=True)
class _Families:
    """A collector for the writer of ``prometheus_client``."""

    families: Iterable[_Merged]

    def collect(self) -> Iterator[Metric]:
        return (family.metric() for family in self.families)


def merge_expositions(texts: Mapping[str, str]) -> str:
    """One valid exposition with every family once.

    Counters and histograms of the same name and labels are summed, so a scraper sees one series for all ingress
    processes. Metrics of other types keep each value, with the label ``piece_host`` where two processes expose the same
    series. ``python_*``, ``process_*`` and the creation times of summed series are left out.

    Args:
        texts: The expositions by process name. Histograms of one name must have the same buckets.

    Raises:
        ValueError: A text cannot be parsed, or two processes give a family different types; the message names the
            process.
    """
    merged: dict[str, _Merged] = {}
    for process, text in texts.items():
        for family in _parse(process, text):
            _add(merged, process, family)
    shown = [family for family in merged.values() if not _is_hidden(family, merged)]
    return generate_latest(_Families(shown)).decode()


def _parse(process: str, text: str) -> list[Metric]:
    try:
        return list(text_string_to_metric_families(text))
    except ValueError as error:
        raise ValueError(f"the metrics of {process} cannot be read: {error}") from error


def _add(merged: dict[str, _Merged], process: str, family: Metric) -> None:
    target = merged.setdefault(family.name, _Merged(family.name, family.documentation, family.type))
    if target.type != family.type:
        raise ValueError(f"the metrics of {process} have {family.name} as {family.type}, others as {target.type}")
    for sample in family.samples:
        series = (sample.name, tuple(sorted(sample.labels.items())))
        target.values.setdefault(series, {})[process] = sample.value


def _is_hidden(family: _Merged, merged: Mapping[str, _Merged]) -> bool:
    base = merged.get(family.name.removesuffix(_CREATED))
    begins_a_sum = base is not None and base is not family and base.type in _SUMMED
    return begins_a_sum or family.name.startswith(_HIDDEN)
