"""A replica whose device pool has tiers below it: the tiers of a server (``kvcache.tiers``), with the time of copies.

Blocks are saved beside the steps, one order for each tier at a time. A sequence whose blocks come back goes on when
they are there; others may start before it.
"""

from __future__ import annotations

import heapq

from farsight.core.request import Residency
from farsight.kvcache import StepBatch
from farsight.kvcache.step_batch import KVCopy
from farsight.kvcache.tiers import TierCounts
from farsight.simulator.cluster.memory_below import TieredExecutor
from farsight.simulator.cluster.replica import Replica


class TieredReplica(Replica):
    """A ``Replica`` over ``ReplicaShape.below``."""

    def _set_up(self) -> None:
        shape, below = self.shape, self.shape.below
        assert below is not None
        assert isinstance(self.executor, TieredExecutor)
        self._link_s, self._disk_s = self._latency.copy_s(shape.block_size), below.disk_block_s(shape.block_size)
        self.tiers = below.tiers(shape.block_size)
        if self.tiers is not None:
            self.tiers.prices.host_block_s = self._link_s
            self.tiers.prices.disk_block_s = self._link_s + self._disk_s
            self.executor.keep_tiers(self.tiers)
        self._returns: dict[int, tuple[int, float]] = {}  # blocks of each, and when it began
        self._saves: list[tuple[float, int]] = []  # (done at, copy id), a heap
        self._disk_free_at = {Residency.DEVICE: 0.0, Residency.DISK: 0.0}  # for reads and for writes

    @property
    def written_bytes(self) -> int:
        """Bytes written to the disk so far."""
        return 0 if self.tiers is None else self.tiers.counts.disk_saved * self.tiers.limits.block_bytes

    @property
    def restored_tokens(self) -> dict[str, int]:
        """Tokens that each tier has brought back so far."""
        counts = TierCounts() if self.tiers is None else self.tiers.counts
        size = self.shape.block_size
        return {"host": counts.host_brought * size, "disk": counts.disk_brought * size}

    def _prepare(self, now: float) -> StepBatch | None:
        if self.tiers is not None:
            self.tiers.tick(now)
            self._save_until(now)
            self.tiers.take_dropped()
        return super()._prepare(now)

    def _save_until(self, now: float) -> None:
        """Books the saves that have ended since the last look, one behind the other as steps would have begun them."""
        assert isinstance(self.executor, TieredExecutor)
        while self._saves and self._saves[0][0] <= now:
            done_at, copy_id = heapq.heappop(self._saves)
            self.executor.complete_copy(copy_id)
            self.executor.transfers.order_saves()
            for copy in self.executor.take_copies():
                self._copy_done_at(copy, done_at)

    def _complete_copy(self, copy_id: int, now: float) -> None:
        if copy_id in self._returns and self.tiers is not None:
            num_blocks, began_at = self._returns.pop(copy_id)
            self.tiers.outcomes[copy_id] = num_blocks, now - began_at
        super()._complete_copy(copy_id, now)

    def _copy_done_at(self, copy: KVCopy, now: float) -> float | None:
        """Returns when a copy is done; None for one that no sequence waits for, which ends no step."""
        if not copy.names:
            return super()._copy_done_at(copy, now)
        num = len(copy.names)
        num_disk = num if copy.to is Residency.DISK else copy.tiers.count(Residency.DISK)
        began_at = done_at = now
        if copy.source or copy.target:  # it crosses the link
            direction = Residency.DEVICE if copy.target else Residency.HOST
            began_at = max(now, self._link_free_at[direction])
            done_at = self._link_free_at[direction] = began_at + num * self._link_s
        if num_disk:
            used = Residency.DISK if copy.to is Residency.DISK else Residency.DEVICE
            began_at = max(now, self._disk_free_at[used])
            self._disk_free_at[used] = began_at + num_disk * self._disk_s
            done_at = max(done_at, self._disk_free_at[used])
        if copy.target:
            self._returns[copy.copy_id] = num, began_at
            return done_at
        heapq.heappush(self._saves, (done_at, copy.copy_id))
        return None
