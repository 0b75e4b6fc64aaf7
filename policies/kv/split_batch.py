"""A batch runs as a whole or not at all: what batch mode admits, and what it does when memory runs out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from policies.interfaces import Admission, KvMoves, KvPolicy, KvView
from policies.job import Job


class WholeBatch(Admission):
    """Admits whatever comes: it was put together as one batch, and its memory was counted then. All O(1)."""

    max_skips = 0

    def begin(self, running: Sequence[Job], capacity: int) -> None:
        """Nothing is counted."""

    def admits(self, job: Job) -> bool:
        return True

    def add(self, job: Job) -> None:
        """Nothing is counted."""


@dataclass(frozen=True, slots=True)
class SplitBatch(KvPolicy):
    """Nobody of a batch is preempted for the others: a batch that runs out of memory breaks off (Magnus III-C).

    It also breaks off at once if its prompts do not fit together. Jobs whose clients do not read are not part of what
    runs; theirs is the first memory to go. O(jobs).
    """

    evicts: bool = False
    swaps: bool = False
    watches: bool = True

    def moves(self, view: KvView, now: float) -> KvMoves:
        lacking = view.needed - view.free
        if len(view.running) > 1:  # what a worker lacked a moment ago, a job may find now that it is alone
            lacking = max(lacking, view.short)
        drop = []
        for job in reversed(view.idle):
            if lacking <= 0:
                break
            if job.is_resident:
                drop.append(job)
                lacking -= -(-job.computed_len // view.block_size) * view.block_size
        return KvMoves(drop=tuple(drop), break_off=lacking > 0)
