"""The open requests of the ingress replicas, and whether the whole service drains: a state machine without a clock, and
the task that tells it which ingress replicas have died."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection

from farsight.actors.runtime.component import Gone
from farsight.core.messages.supervision import DrainProgress, DrainService, IngressReport

SILENCE_S = 3.0
"""An ingress replica that has not reported for so many seconds may have died. Until that is known, its requests
count: the replica may only be busy."""

TICK_S = 1.0
"""Seconds between two questions to Ray which silent ingress replicas have died."""


class IngressReports:
    """Passes the launcher's order on to the ingress replicas, and their reports back.

    No state of it must survive: the launcher repeats its order, and an ingress replica that drains goes on draining.
    """

    def __init__(self) -> None:
        self._until: float | None = None
        self._reports: dict[str, tuple[float, IngressReport]] = {}

    def order(self, order: DrainService, now: float) -> DrainProgress:
        """Takes the launcher's order to drain and returns the progress; a later order may end the drain sooner.

        Args:
            now: Seconds, never less than in an earlier call.
        """
        self._until = now + order.drain_s
        reports = [report for _, report in self._reports.values()]
        all_done = all(report.is_draining and not report.num_open for report in reports)
        return DrainProgress(sum(report.num_open for report in reports), all_done and len(reports) >= order.num_ingress)

    def report(self, report: IngressReport, now: float) -> float | None:
        """Takes a report; returns the seconds left of the drain, None if the service does not drain."""
        self._reports[report.ingress_id] = now, report
        return None if self._until is None else max(0.0, self._until - now)

    def model_version(self) -> int | None:
        """Returns the lowest weights version that new requests get; None without an ingress replica."""
        return min((report.model_version for _, report in self._reports.values()), default=None)

    def oldest_version(self) -> int | None:
        """Returns the lowest weights version of an open request; None without an ingress replica."""
        return min((report.oldest_version for _, report in self._reports.values()), default=None)

    def silent(self, now: float) -> list[str]:
        """Returns the ingress replicas that may have died."""
        return [each for each, (heard_at, _) in self._reports.items() if now - heard_at > SILENCE_S]

    def forget(self, ingress_ids: Collection[str]) -> None:
        """Drops ingress replicas that have died, and their requests with them."""
        for ingress_id in ingress_ids:
            self._reports.pop(ingress_id, None)

    async def watch(self, gone: Gone) -> None:
        """Drops ingress replicas that have died; never returns."""
        while True:
            self.forget(await gone(self.silent(time.monotonic())))
            await asyncio.sleep(TICK_S)
