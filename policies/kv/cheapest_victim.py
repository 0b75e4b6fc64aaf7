"""Evicts by rank: the job least likely to run again soon leaves the device first.

If the cost of a move is linear in its tokens, the least cost per token and time away gives the order of return itself;
the remaining decision is whether to move a victim or to compute it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from farsight.core.errors import InvalidValueError
from farsight.policies.interfaces import KV_POLICIES, Job, KvMoves, KvPolicy, KvView, ReplicaContext
from farsight.policies.order.gittins import Gittins


@dataclass(frozen=True, slots=True)
class CheapestVictim(KvPolicy):
    """A ``KvPolicy`` that acts only when memory is short; O(m log m) then, for m jobs that do not run.

    Victims are the idle residents, worst rank first, then the running jobs from the tail, except the first. A victim
    moves to the host; it is dropped if the host has no room, or if so few tokens are computed that computing them
    again costs less than the bookkeeping of a move.

    Attributes:
        order: Source of the ranks.
        min_swap_len: In tokens; a victim with fewer computed tokens is dropped.
        min_host_share: No job starts into this share of the host memory (``KvView.start_room``).
        evicts: As in ``KvPolicy``.
        swaps: As in ``KvPolicy``.

    Raises:
        InvalidValueError: The length is negative, or the share is outside [0, 1].
    """

    order: Gittins
    min_swap_len: int = 256
    min_host_share: float = 0.1
    evicts: bool = True
    swaps: bool = True

    def __post_init__(self) -> None:
        if self.min_swap_len < 0:
            raise InvalidValueError("min_swap_len", self.min_swap_len, "0 or more")
        if not 0 <= self.min_host_share <= 1:
            raise InvalidValueError("min_host_share", self.min_host_share, "a number in [0, 1]")

    def moves(self, view: KvView, now: float) -> KvMoves:
        """Frees the memory that the running jobs lack. A job on the host returns when admission lets it execute again:
        an earlier return would take the memory in which other jobs grow, and force it out again.
        """
        short = view.needed - view.free
        if short <= 0:
            return KvMoves()
        offload: list[Job] = []
        drop: list[Job] = []
        host_free = view.host_free
        for job in [*reversed(self._by_rank(view.idle)), *reversed(view.running[1:])]:
            if short <= 0:
                break
            if not job.is_resident:
                continue
            short -= job.computed_len
            if self.min_swap_len <= job.computed_len <= host_free:
                offload.append(job)
                host_free -= job.computed_len
            else:
                drop.append(job)
        return KvMoves(tuple(offload), tuple(drop))

    def start_room(self, view: KvView) -> float:
        return view.start_room(self.min_host_share)

    def _by_rank(self, jobs: Sequence[Job]) -> list[Job]:
        """Returns the jobs best first; urgency before rank."""
        if not jobs:
            return []
        ranks = self.order.rank(list(jobs)).tolist()
        paired = sorted(zip(jobs, ranks, strict=True), key=lambda pair: (pair[0].urgency, pair[1], pair[0].arrived_at))
        return [job for job, _ in paired]


@KV_POLICIES.register("cheapest-victim", needs="gittins", swaps=True)
def build_cheapest_victim(context: ReplicaContext) -> CheapestVictim:
    """Evicts victims by the rank of the Gittins order."""
    return CheapestVictim(context.order_as(Gittins))
