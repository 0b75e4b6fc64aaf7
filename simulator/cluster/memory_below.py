"""What a simulated replica has below its device's pool, and the executor that knows of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from farsight.core.errors import InvalidValueError
from farsight.kvcache import StepBatch
from farsight.kvcache.batch_draft import BatchDraft
from farsight.kvcache.executor import SequenceState
from farsight.kvcache.lease import LeaseExecutor
from farsight.kvcache.tiers import KVTiers, TierLimits


@dataclass(frozen=True, slots=True)
class MemoryBelow:
    """The tiers below the pool of a device.

    Attributes:
        host_tokens, disk_tokens: Tokens of KV that each holds; 0 for none.
        disk_bandwidth: Bytes a second that the disk reads, and writes as well.
        token_bytes: Bytes of the KV of one token.
        write_bytes_per_hour: As in ``TierLimits``.

    Raises:
        InvalidValueError: A number is negative, or there is a disk without a bandwidth.
    """

    host_tokens: int = 0
    disk_tokens: int = 0
    disk_bandwidth: float = 0.0
    token_bytes: int = 0
    write_bytes_per_hour: int = 0

    def __post_init__(self) -> None:
        for name in ("host_tokens", "disk_tokens", "disk_bandwidth", "write_bytes_per_hour"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InvalidValueError(name, getattr(self, name), "a number >= 0")
        if self.disk_tokens and not (self.disk_bandwidth and self.token_bytes):
            expected = "bytes a second above 0, and token_bytes, where there is a disk"
            raise InvalidValueError("disk_bandwidth", self.disk_bandwidth, expected)

    def tiers(self, block_size: int) -> KVTiers | None:
        """Returns what a worker keeps of the tiers; None where there is none."""
        blocks = self.host_tokens // block_size, self.disk_tokens // block_size
        if not any(blocks):
            return None
        size = block_size * self.token_bytes
        return KVTiers(TierLimits(*blocks, block_bytes=size, write_bytes_per_hour=self.write_bytes_per_hour))

    def disk_block_s(self, block_size: int) -> float:
        """Returns the seconds in which the disk reads or writes a block."""
        return block_size * self.token_bytes / self.disk_bandwidth if self.disk_bandwidth else 0.0


NOTHING_BELOW = MemoryBelow()


class TieredExecutor(LeaseExecutor):
    """A ``LeaseExecutor`` whose equal steps are taken at once even where sequences wait for memory."""

    _awaits_block = False  # whether a start was put off because its next block is being computed

    def next_batch(self) -> StepBatch | None:
        self._awaits_block = False
        return super().next_batch()

    def _cached_blocks(self, held: SequenceState, wanted: int, draft: BatchDraft) -> list[int] | None:
        cached = super()._cached_blocks(held, wanted, draft)
        self._awaits_block |= cached is None
        return cached

    def horizon(self, batch: StepBatch, most: int) -> int:
        """Returns the answer of ``LeaseExecutor``; sequences that wait for memory alone do not shorten the run.

        Steps that only decode free no memory and compute no block of another's prompt.
        """
        if self._awaits_block:
            return super().horizon(batch, most)
        hashes, self._block_hashes = self._block_hashes, None
        try:
            return super().horizon(batch, most)
        finally:
            self._block_hashes = hashes
