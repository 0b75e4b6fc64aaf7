"""A replica whose device pool has tiers below it: the tiers of a server (``kvcache.tiers``), with the time of copies.

Blocks are saved between steps, as far as the link and the disk have had time. A sequence whose blocks come back starts
when they are there; others may start before it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from farsight.core.errors import InvalidValueError
from farsight.core.messages.kv import BlockName
from farsight.core.messages.plans import FinishedSequence
from farsight.core.request import Request, Residency
from farsight.kvcache import StepBatch
from farsight.kvcache.batch_draft import BatchDraft
from farsight.kvcache.block_manager import NO_PARENT
from farsight.kvcache.executor import SequenceState
from farsight.kvcache.lease import LeaseExecutor
from farsight.kvcache.tiers import KVTiers, Return, TierLimits
from farsight.simulator.cluster.latency import StepRun
from farsight.simulator.cluster.records import Record
from farsight.simulator.cluster.replica import Replica


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


@dataclass(slots=True)
class _Coming:
    """Blocks on their way to the device; ``is_there``: their copy is over, and they are to be registered."""

    request_id: str
    names: list[int]
    first: int
    expected: Return
    began_at: float
    done_at: float
    is_there: bool = False

    @property
    def owner(self) -> str:
        """The holder of their memory; no request id contains a NUL."""
        return f"\0return {self.request_id}"


class TieredExecutor(LeaseExecutor):
    """A ``LeaseExecutor`` that asks before a start whether blocks come back first.

    Attributes:
        replica: Answers; set by the replica.
    """

    replica: TieredReplica
    _awaits_block = False  # whether a start was put off because a running sequence computes its next block

    def _start(self, held: SequenceState, wanted: int, draft: BatchDraft) -> bool:
        if not draft.may_start or self.replica.brings_back(held, wanted, draft):
            return False
        return super()._start(held, wanted, draft)

    def has_room(self, needed: int, draft: BatchDraft) -> bool:
        """Returns whether ``needed`` blocks are free for a start; if not, no later sequence starts in this step."""
        return self._has_room(needed, draft)

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


class TieredReplica(Replica):
    """A ``Replica`` over ``ReplicaShape.below``."""

    def _set_up(self) -> None:
        shape, below = self.shape, self.shape.below
        assert below is not None
        assert isinstance(self.executor, TieredExecutor)
        self.executor.replica = self
        self._link_s = self._latency.copy_s(shape.block_size)
        self._disk_s = below.disk_block_s(shape.block_size)
        self.tiers = below.tiers(shape.block_size)
        if self.tiers is not None:
            self.tiers.prices.host_block_s = self._link_s
            self.tiers.prices.disk_block_s = self._link_s + self._disk_s
            told = self._on_start

            def starts(record: Record, queue_s: float, tiers: KVTiers = self.tiers) -> None:
                tiers.leave(record.arrival.request_id)
                told(record, queue_s)

            self._on_start = starts
        self._coming: dict[str, _Coming] = {}
        self._link_up_at = self._disk_reads_at = 0.0  # when each is free
        self._link_down_at = self._disk_writes_at = 0.0
        self._now = self._saved_at = 0.0

    @property
    def written_bytes(self) -> int:
        """Bytes written to the disk so far."""
        return 0 if self.tiers is None else self.tiers.counts.disk_saved * self.tiers.limits.block_bytes

    @property
    def wakes_at(self) -> float:
        return min(super().wakes_at, self._lands_at)

    @property
    def _lands_at(self) -> float:
        return min((each.done_at for each in self._coming.values() if not each.is_there), default=math.inf)

    def wake(self, now: float) -> None:
        for each in self._coming.values():
            if not each.is_there and each.done_at <= now:
                each.is_there = True
                self._cut(now)
        super().wake(now)

    def submit(self, requests: list[tuple[Request, Record]], now: float) -> None:
        for request, _ in requests if self.tiers is not None else ():
            self.tiers.wait(request.request_id, request.prefix_hashes)
        super().submit(requests, now)

    def _prepare(self, now: float) -> StepBatch | None:
        self._now = now
        if self.tiers is not None:
            self.tiers.tick(now)
            self._land(self.tiers, now)
            self._save(self.tiers, now)
        return super()._prepare(now)

    def brings_back(self, held: SequenceState, wanted: int, draft: BatchDraft) -> bool:
        """Returns whether a start has to wait: its blocks are on their way, or there is no room to bring them."""
        if self.tiers is None:
            return False
        if held.request_id in self._coming:
            return True
        blocks, size = self.executor.blocks, self.shape.block_size
        limit = (wanted - 1) // size
        names = self._block_hashes(held.request_id, limit)
        cached = blocks.match(names, limit)
        if len(cached) == limit:
            return False
        needed = blocks.blocks_for(held.num_tokens) - blocks.num_held(cached)
        assert isinstance(self.executor, TieredExecutor)
        if not self.executor.has_room(needed, draft):
            return True
        expected = self.tiers.worth(names, len(cached), limit, size)
        if expected is None:
            return False
        end = len(cached) + len(expected.tiers)
        num_disk = sum(tier is Residency.DISK for tier in expected.tiers)
        self._link_up_at = max(self._link_up_at, self._now) + len(expected.tiers) * self._link_s
        done_at = self._link_up_at
        if num_disk:
            self._disk_reads_at = max(self._disk_reads_at, self._now) + num_disk * self._disk_s
            done_at = max(done_at, self._disk_reads_at + self._link_s)
        coming = _Coming(held.request_id, list(names[:end]), len(cached), expected, self._now, done_at)
        blocks.share(coming.owner, cached)
        table = blocks.grow(coming.owner, end * size)
        assert table is not None, "there is room"
        self.tiers.begin_return(names[len(cached) : end], expected)
        self._coming[held.request_id] = coming
        return True

    def _land(self, tiers: KVTiers, now: float) -> None:
        """Makes blocks that have come back part of the cache, for the start that waits for them."""
        for each in [each for each in self._coming.values() if each.is_there]:
            del self._coming[each.request_id]
            end = len(each.names)
            self.executor.blocks.register(each.owner, each.first, each.names, end)
            self.executor.blocks.release(each.owner)
            self.executor.revision += 1
            tiers.returned(each.names[each.first :], each.expected, end - each.first, now - each.began_at)
            record = self._records.get(each.request_id)
            if record is not None and not record.num_tokens:
                num_disk = sum(tier is Residency.DISK for tier in each.expected.tiers)
                record.disk_len += num_disk * self.shape.block_size
                record.host_len += (end - each.first - num_disk) * self.shape.block_size

    def _save(self, tiers: KVTiers, now: float) -> None:
        """Saves what the link and the disk have had time for since the last step."""
        before, self._saved_at = self._saved_at, now
        while max(self._link_down_at, self._disk_writes_at) <= now:
            save = tiers.next_save(self.executor.blocks.caches)
            if save is None:
                break
            num = len(save.blocks)
            if save.source is Residency.DEVICE:
                self._link_down_at = max(self._link_down_at, before) + num * self._link_s
            if save.to is Residency.DISK:
                self._disk_writes_at = max(self._disk_writes_at, before) + num * self._disk_s
            tiers.saved(save)
        tiers.take_dropped()

    def _book(self, run: StepRun) -> bool:
        if run.work.prefill_tokens and self.tiers is not None:
            self.tiers.prices.computed(run.work.prefill_tokens, run.seconds(1))
        return super()._book(run)

    def _end(self, finished: FinishedSequence, now: float) -> None:
        if self.tiers is not None:
            self.tiers.leave(finished.request_id)
            names = self._hashes[finished.request_id]
            parents = [NO_PARENT, *names]
            caches = self.executor.blocks.caches
            self.tiers.ended(BlockName(*each) for each in zip(names, parents, strict=False) if caches(each[0]))
        super()._end(finished, now)
