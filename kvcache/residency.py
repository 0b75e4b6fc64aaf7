"""Where each sequence's KV is, as the worker last said: the KV offload manager's shadow of the truth.

The worker owns the blocks (design section 3, rule 5); this only remembers. It is what offload and upload will be
decided from.
"""

from __future__ import annotations

from core.messages import KVUsage, StepReport


class ResidencyShadow:
    """The KV of one replica."""

    def __init__(self) -> None:
        self._num_blocks = 0
        self._report: StepReport | None = None

    def observe(self, report: StepReport) -> None:
        """Takes a report; one that is older than what is known is ignored."""
        known = self._report
        same_life = known is not None and known.worker_incarnation == report.worker_incarnation
        if known is not None and same_life and report.report_seq <= known.report_seq:
            return
        self._report = report
        in_tables = sum(progress.num_blocks for progress in report.progress)
        self._num_blocks = report.free_blocks + in_tables - report.shared_blocks

    @property
    def usage(self) -> KVUsage:
        """Zeros before the first report."""
        if self._report is None:
            return KVUsage(0, 0, 0, 0)
        resident = sum(progress.num_blocks > 0 for progress in self._report.progress)
        return KVUsage(self._num_blocks, self._report.free_blocks, resident, self._report.short_blocks)

    @property
    def used_fraction(self) -> float:
        """Share of the pool in use, 0 to 1."""
        usage = self.usage
        return 1 - usage.free_blocks / usage.num_blocks if usage.num_blocks else 0.0
