"""Evicts the newest jobs (vLLM's rule): their KV is dropped and computed again later, or moved to the host."""

from __future__ import annotations

from dataclasses import dataclass

from farsight.policies.interfaces import KV_POLICIES, Job, KvMoves, KvPolicy, KvView, ReplicaContext


@dataclass(frozen=True, slots=True)
class NewestGiveWay(KvPolicy):
    """Acts only when running jobs cannot continue. O(victims).

    The job of the best rank is never a victim: it always fits alone, so the replica makes progress.

    Attributes:
        swaps: Whether victims keep their KV on the host while there is room.
    """

    swaps: bool = False

    def moves(self, view: KvView, now: float) -> KvMoves:
        """Takes jobs that do not execute, then running jobs from the last, as victims until enough memory is free."""
        short, host_free = view.needed - view.free, view.host_free
        offload: list[Job] = []
        drop: list[Job] = []
        for job in (*reversed(view.idle), *reversed(view.running[1:])):
            if short <= 0:
                break
            if not job.is_resident:
                continue
            short -= job.computed_len
            if self.swaps and job.computed_len <= host_free:
                offload.append(job)
                host_free -= job.computed_len
            else:
                drop.append(job)
        return KvMoves(tuple(offload), tuple(drop))


@KV_POLICIES.register("recompute-newest")
def build_recompute_newest(context: ReplicaContext) -> NewestGiveWay:
    """Drops the KV of the newest jobs, which compute it again."""
    return NewestGiveWay()


@KV_POLICIES.register("swap-newest", swaps=True)
def build_swap_newest(context: ReplicaContext) -> NewestGiveWay:
    """Moves the KV of the newest jobs to the host."""
    return NewestGiveWay(swaps=True)
