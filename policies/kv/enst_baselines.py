"""Baselines of FastServe's proactive swapping (section 6.3); victims come in the same order, by ENST."""

from __future__ import annotations

from dataclasses import dataclass

from farsight.core.decisions import Facts
from farsight.policies.interfaces import KV_POLICIES, Job, KvMoves, KvPolicy, KvView, ReplicaContext
from farsight.policies.kv.enst_offload import MIN_HOST_SHARE, by_enst, enst_s, make_room
from farsight.policies.order.skip_join_mlfq import SkipJoinMlfq


@dataclass(frozen=True, slots=True)
class OnDemand(KvPolicy):
    """KV gives way at the moment its room is needed: that of the jobs with the longest ENST first."""

    order: SkipJoinMlfq
    evicts: bool = True
    swaps: bool = False

    def moves(self, view: KvView, now: float) -> KvMoves:
        if view.needed <= view.free:
            return KvMoves()
        return make_room(view, by_enst(self.order, view.idle, now)[::-1], swaps=self.swaps).moves

    def explain(self, job: Job, now: float) -> Facts:
        return {"enst_s": enst_s(self.order, [job], now)[job.request_id]}


@dataclass(frozen=True, slots=True)
class Defer(OnDemand):
    """A newcomer waits until others end and leave it a place; preemption then goes no further than memory does.

    Running jobs grow here, while the paper's slots hold whole jobs: if they cannot go on, KV is dropped.
    """

    evicts: bool = False


@dataclass(frozen=True, slots=True)
class Reactive(OnDemand):
    """KV is moved to the host at the moment its room is needed, so that the newcomer waits for the copy."""

    swaps: bool = True

    def start_room(self, view: KvView) -> float:
        return view.start_room(MIN_HOST_SHARE)


@dataclass(frozen=True, slots=True)
class Recompute(OnDemand):
    """KV is dropped when its room is needed and prefilled again later.

    With a short starvation limit, promoted jobs and the jobs they displaced may drop each other's KV without end
    (section 4.2); the limit has to be well above a prefill.
    """


@KV_POLICIES.register("enst-defer", needs="skip-join-mlfq")
def build_defer(context: ReplicaContext) -> Defer:
    """Makes newcomers wait for memory."""
    return Defer(context.order_as(SkipJoinMlfq))


@KV_POLICIES.register("enst-reactive", needs="skip-join-mlfq", swaps=True)
def build_reactive(context: ReplicaContext) -> Reactive:
    """Moves KV to the host when its room is needed."""
    return Reactive(context.order_as(SkipJoinMlfq))


@KV_POLICIES.register("enst-recompute", needs="skip-join-mlfq")
def build_recompute(context: ReplicaContext) -> Recompute:
    """Drops KV when its room is needed."""
    return Recompute(context.order_as(SkipJoinMlfq))
