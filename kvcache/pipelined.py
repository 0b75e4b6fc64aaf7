"""Ragged execution with several steps in progress at once, as a pipeline of stages needs it.

A sequence is in one step at a time, for its next token follows from its last. So the sequences that could run are
divided among as many batches as there are stages; every stage takes the batches in the same order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from farsight.core.errors import IntegrityError
from farsight.core.messages.plans import FinishedSequence
from farsight.core.request import Residency, SequenceStatus
from farsight.kvcache.batch_draft import BatchDraft
from farsight.kvcache.block_manager import BlockManager
from farsight.kvcache.executor import NO_FURTHER, SequenceState
from farsight.kvcache.lease import LeaseExecutor
from farsight.kvcache.step_batch import BatchLimits, StepBatch


class PipelinedExecutor(LeaseExecutor):
    """A ``LeaseExecutor`` of which several steps may have begun.

    Plans apply while steps run. A sequence that a plan takes out of a running step loses its blocks at once: later
    steps may use them, since every stage computes these steps later. The running step's result for it is dropped.

    Args:
        max_in_flight: Steps that may have begun and not been committed: one per stage.
    """

    def __init__(
        self,
        blocks: BlockManager,
        limits: BatchLimits,
        incarnation: str,
        host: BlockManager | None = None,
        *,
        max_in_flight: int,
    ) -> None:
        super().__init__(blocks, limits, incarnation, host)
        self.max_in_flight = max_in_flight
        self._share = 1

    def next_batch(self) -> StepBatch | None:
        """Returns the next step, as ``PlanExecutor.next_batch``, with at most one batch's share of the sequences."""
        runnable = sum(self._may_run(held) for held in self._held.values())
        self._share = max(1, -(-runnable // self.max_in_flight))
        self._running = [
            held
            for held in self._held.values()
            if held.status is SequenceStatus.RUNNING and held.request_id not in self._busy
        ]
        batch = super().next_batch()
        if batch is not None:
            self._busy |= {item.request_id: batch for item in batch.items}
        return batch

    def _may_run(self, held: SequenceState) -> bool:
        """Returns whether the sequence takes part in steps, now or when its current step is over."""
        paused = held.request_id in self._stalled or held.copy_id is not None or held.residency is Residency.HOST
        return not paused and self.blocks.holds_any(held.request_id)

    def _continue(self, held: SequenceState, wanted: int, draft: BatchDraft) -> None:
        if len(draft.items) < self._share:
            super()._continue(held, wanted, draft)

    def _offload(self, held: SequenceState, host: BlockManager) -> None:
        """Offloads the sequence when its current step is over."""
        if held.request_id not in self._busy:
            super()._offload(held, host)

    def _free(self, held: SequenceState) -> None:
        self._busy.pop(held.request_id, None)
        super()._free(held)

    def counts(self, batch: StepBatch, request_id: str) -> bool:
        return self._busy.get(request_id) is batch

    def commit(
        self,
        batch: StepBatch,
        stopped: Iterable[str] = (),
        failed: Collection[str] = (),
        *,
        further: Mapping[str, int] = NO_FURTHER,
        duration_s: float = 0.0,
        num_steps: int = 1,
    ) -> list[FinishedSequence]:
        """Books a step, as ``PlanExecutor.commit``; steps are booked in the order in which they began."""
        items = tuple(item for item in batch.items if self.counts(batch, item.request_id))
        for item in items:
            del self._busy[item.request_id]
        return super().commit(
            StepBatch(items), stopped, failed, further=further, duration_s=duration_s, num_steps=num_steps
        )

    def check_integrity(self) -> None:
        """Raises IntegrityError unless lengths, blocks, copies and steps under way agree."""
        super().check_integrity()
        for request_id, batch in self._busy.items():
            held = self._held.get(request_id)
            if held is None or held.copy_id is not None or not self.blocks.holds_any(held.request_id):
                raise IntegrityError(f"{request_id}: in a step under way, without blocks to compute in")
            item = next(item for item in batch.items if item.request_id == request_id)
            if item.start != held.computed_len:
                raise IntegrityError(f"{request_id}: {held.computed_len} computed, its step begins at {item.start}")
