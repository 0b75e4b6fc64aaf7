"""Batch mode's admission and KV policy: a batch runs as a whole or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from farsight.policies.interfaces import Admission, Job, KvMoves, KvPolicy, KvView


class WholeBatch(Admission):
    """Admits every job: the batcher counted the memory when it formed the batch. All O(1)."""

    def begin(self, running: Sequence[Job], capacity: int) -> None:
        """Does nothing: no memory is counted here."""

    def admits(self, job: Job) -> bool:
        return True

    def add(self, job: Job) -> None:
        """Does nothing: no memory is counted here."""


@dataclass(frozen=True, slots=True)
class SplitBatch(KvPolicy):
    """No job of a batch is preempted for the others: a batch that runs out of memory breaks off (Magnus III-C).

    A batch also breaks off at once if its prompts do not fit together. Jobs whose clients do not read are paused and do
    not run; their memory is freed first. O(jobs).
    """

    watches: bool = True

    def is_due(self, view: KvView) -> bool:
        return _lacking(view) > 0

    def moves(self, view: KvView, now: float) -> KvMoves:
        lacking = _lacking(view)
        drop = []
        for job in reversed(view.idle):
            if lacking <= 0:
                break
            if job.is_resident:
                drop.append(job)
                lacking -= -(-job.computed_len // view.block_size) * view.block_size
        return KvMoves(drop=tuple(drop), break_off=lacking > 0)


def _lacking(view: KvView) -> int:
    """Returns the tokens that are lacking; a job that is alone may now find memory that the worker lacked before."""
    lacking = view.needed - view.free
    return max(lacking, view.short) if len(view.running) > 1 else lacking
