"""KVOffloadManager: chooses the requests whose KV is offloaded or uploaded on one replica; knows where KV is.

Its Scheduler asks at each scheduling point at which KV may have to move. The next plan carries the
orders that still fit (ADR 70). No decision depends on state kept here: a successor answers the next question.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from farsight.actors.calls.scheduling import KVOffloadCalls
from farsight.actors.runtime.component import Component, ComponentContext
from farsight.actors.runtime.metrics import EngineMetrics, OffloadMetrics
from farsight.core.errors import MessageError
from farsight.core.messages.kv import KVUsage, OffloadOrders, OffloadQuestion
from farsight.core.messages.plans import StepReport
from farsight.kvcache.cache_journal import ResidencyMirror
from farsight.policies.compose import configured_offload


class KVOffloadManager(Component, KVOffloadCalls):
    """Hosts the KV policy and the residency mirror, which the Scheduler feeds with the worker's reports."""

    kind = "KVOffloadManager"

    def __init__(self, context: ComponentContext) -> None:
        super().__init__(context)
        scheduler = context.config.scheduler
        self._decider = configured_offload(scheduler, context.config.engine.max_num_seqs)
        self._mirror = ResidencyMirror()
        self._metrics = EngineMetrics(context.registry, context.config.model.name, context.index)
        self._counts = OffloadMetrics(context.registry, context.config.model.name, context.index)
        self._observed_at: float | None = None
        self._num_decided = 0

    async def stop(self) -> None:
        await super().stop()
        self._counts.remove()

    async def decide(self, question: OffloadQuestion) -> OffloadOrders:
        if self._decider is None:
            raise MessageError("OffloadQuestion", question.seq, "none: this KV policy is the Scheduler's alone")
        orders = self._decider.decide(question)
        self._counts.set_idle_target(orders.idle_target)
        self._num_decided += 1
        numbers = {"num_out": len(orders.offload), "num_dropped": len(orders.drop), "num_back": len(orders.upload)}
        if any(numbers.values()):
            self.note("kv_ordered", **numbers, idle_target_tokens=orders.idle_target)
        return orders

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
    def work_done(self) -> Mapping[str, float]:
        traffic = self._mirror.usage.traffic
        return {
            "questions decided": self._num_decided,
            "offloads": traffic.offloads,
            "uploads": traffic.uploads,
            "tokens recomputed": traffic.recomputed_tokens,
        }

    @property
    def last_step_age_s(self) -> float | None:
        return None if self._observed_at is None else time.monotonic() - self._observed_at
