"""Where each sequence's KV is, as the worker last reported: the KV offload manager's mirror.

The worker owns the blocks (design section 3, rule 5) and the scheduler decides what moves; this only remembers.
"""

from __future__ import annotations

from dataclasses import fields

from core.messages.kv import KVTraffic, KVUsage
from core.messages.plans import StepReport


class ResidencyMirror:
    """The KV of one replica."""

    def __init__(self) -> None:
        self._num_blocks = 0
        self._report: StepReport | None = None

    def observe(self, report: StepReport) -> KVTraffic:
        """Applies a report; ignores one that is older than the last.

        Returns:
            The moves since the report before it, or since the worker's life began.
        """
        known = self._report
        same_life = known is not None and known.worker_incarnation == report.worker_incarnation
        if known is not None and same_life and report.report_seq <= known.report_seq:
            return KVTraffic()
        self._report = report
        in_tables = sum(progress.num_blocks for progress in report.progress)
        self._num_blocks = report.free_blocks + in_tables - report.shared_blocks
        before = known.traffic if known is not None and same_life else KVTraffic()
        return _since(before, report.traffic)

    @property
    def usage(self) -> KVUsage:
        """Zeros before the first report."""
        report = self._report
        if report is None:
            return KVUsage()
        return KVUsage(
            num_blocks=self._num_blocks,
            free_blocks=report.free_blocks,
            num_resident=sum(progress.num_blocks > 0 for progress in report.progress),
            short_blocks=report.short_blocks,
            num_host_blocks=report.num_host_blocks,
            free_host_blocks=report.free_host_blocks,
            flying_blocks=report.flying_blocks,
            traffic=report.traffic,
        )


def _since(before: KVTraffic, now: KVTraffic) -> KVTraffic:
    return KVTraffic(*(getattr(now, each.name) - getattr(before, each.name) for each in fields(KVTraffic)))


def total_usage(usages: list[KVUsage]) -> KVUsage:
    """Adds the KV usages of several replicas."""
    traffic = KVTraffic(*(sum(getattr(usage.traffic, each.name) for usage in usages) for each in fields(KVTraffic)))
    counts = [each.name for each in fields(KVUsage) if each.name != "traffic"]
    return KVUsage(traffic=traffic, **{name: sum(getattr(usage, name) for usage in usages) for name in counts})
