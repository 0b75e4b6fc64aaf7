"""KVOffloadManager: knows where the KV of one replica is and what has moved.

The worker owns the blocks and only the Scheduler commands it: what moves is decided there, where it is decided who runs
(ADR 17). This component remembers, counts and tells.
"""

from __future__ import annotations

import time

from actors.calls.scheduling import KVOffloadCalls
from actors.runtime.component import Component, ComponentContext
from actors.runtime.metrics import EngineMetrics
from core.messages.kv import KVUsage
from core.messages.plans import StepReport
from kvcache.residency import ResidencyMirror


class KVOffloadManager(Component, KVOffloadCalls):
    """Hosts the residency mirror, fed by the Scheduler with the worker's reports."""

    kind = "KVOffloadManager"

    def __init__(self, context: ComponentContext) -> None:
        super().__init__(context)
        self._mirror = ResidencyMirror()
        self._metrics = EngineMetrics(context.registry, context.config.model.name, context.index)
        self._observed_at: float | None = None

    async def observe(self, report: StepReport) -> None:
        moved = self._mirror.observe(report)
        self._observed_at = time.monotonic()
        self._metrics.set_kv(self._mirror.usage)
        self._metrics.kv_moved(moved)

    async def usage(self) -> KVUsage:
        return self._mirror.usage

    @property
    def queue(self) -> int:
        return self._mirror.usage.num_resident

    @property
    def last_step_age_s(self) -> float | None:
        return None if self._observed_at is None else time.monotonic() - self._observed_at
