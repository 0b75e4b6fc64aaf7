"""A worker's transfers of KV, by one form of order: a stopped sequence's out and back, cached blocks down and up."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from farsight.core.errors import IntegrityError
from farsight.core.messages.kv import BlockName, Brought, KVTraffic
from farsight.core.request import Residency, SequenceStatus
from farsight.kvcache.block_manager import NO_PARENT, BlockManager
from farsight.kvcache.executor import SequenceState
from farsight.kvcache.step_batch import KVCopy
from farsight.kvcache.tiers import KVTiers, Return, Save


@dataclass(slots=True)
class _Flight:
    """A copy in flight.

    Attributes:
        held: Its sequence, which holds the blocks; None when the result is no longer wanted.
        back: What comes back from the tiers, if that is what it does.
        first: The first block that comes back.
    """

    order: KVCopy
    held: SequenceState | None
    back: Return | None = None
    first: int = 0


class Transfers:
    """Orders copies, and books their ends.

    Blocks that are saved stay as free as they were: a block that was evicted before it was read is not kept.

    Args:
        blocks, host: The pools of sequences on the device, and of stopped ones on the host.

    Attributes:
        tiers: What lies below; None where there is no tier.
        traffic: What has moved so far.
        num_brought: Prompt tokens that came back from the tiers, each request's once.
    """

    def __init__(self, blocks: BlockManager, host: BlockManager | None) -> None:
        self.blocks, self.host = blocks, host
        self.tiers: KVTiers | None = None
        self.traffic = KVTraffic()
        self.num_brought = 0
        self._orders: list[KVCopy] = []  # to begin
        self._in_flight: dict[int, _Flight] = {}
        self._saving: dict[Residency, tuple[int, Save]] = {}  # under way, by tier, with their numbers
        self._saves: list[KVCopy] = []  # to begin
        self._num_copies = 0

    @property
    def is_busy(self) -> bool:
        """Whether the end of a copy may let a sequence run; saves let none."""
        return bool(self._orders or self._in_flight)

    @property
    def flying_blocks(self) -> int:
        """Target blocks of copies between the two pools."""
        return sum(len(flight.order.source) for flight in self._in_flight.values())

    def take(self) -> list[KVCopy]:
        """Takes the copies to begin now."""
        orders, self._orders, self._saves = self._orders + self._saves, [], []
        return orders

    def _next_id(self) -> int:
        self._num_copies += 1
        return self._num_copies

    def order(self, held: SequenceState, to: Residency, source: Sequence[int], target: Sequence[int]) -> None:
        """Begins the copy of a stopped sequence's blocks to the other pool."""
        self._begin(held, KVCopy(self._next_id(), to, tuple(source), tuple(target)))

    def _begin(self, held: SequenceState, copy: KVCopy, back: Return | None = None, first: int = 0) -> None:
        held.copy_id = copy.copy_id
        self._orders.append(copy)
        self._in_flight[copy.copy_id] = _Flight(copy, held, back, first)

    def abandon(self, held: SequenceState) -> None:
        """Keeps the blocks of a sequence that is gone until its copy has ended."""
        assert held.copy_id is not None
        self._in_flight[held.copy_id].held = None
        for pool in self._pools:
            pool.hand_over(held.request_id, _orphan(held.copy_id))
        held.copy_id = None

    @property
    def _pools(self) -> tuple[BlockManager, ...]:
        return (self.blocks,) if self.host is None else (self.blocks, self.host)

    def complete(self, copy_id: int, *, failed: bool = False) -> SequenceState | None:
        """Books the end of a copy.

        Returns:
            The sequence that has more blocks on the device than before, which are to be registered.
        """
        flight = self._in_flight.pop(copy_id, None)
        if flight is None:
            self._complete_save(copy_id, failed=failed)
            return None
        if flight.back is not None:
            return self._complete_return(flight, flight.back, failed=failed)
        to, held = flight.order.to, flight.held
        if not failed:
            self._count(flight.order)
        owner = _orphan(copy_id) if held is None else held.request_id
        for pool in self._pools:
            if held is None or failed or pool is (self.blocks if to is Residency.HOST else self.host):
                pool.release(owner)
        if held is None:
            return None
        held.copy_id = None
        if failed:
            held.dropped_len = max(held.dropped_len, held.computed_len)
            held.computed_len, held.status, held.residency = 0, SequenceStatus.WAITING, Residency.DEVICE
        elif to is Residency.HOST:
            held.status = SequenceStatus.OFFLOADED
        else:
            held.status, held.register_at = SequenceStatus.PAUSED, self.blocks.block_size
            return held
        return None

    def _count(self, copy: KVCopy) -> None:
        """Books a copy that has completed."""
        moved, num_bytes = self.traffic, len(copy.source) * self.blocks.block_bytes
        if copy.to is Residency.HOST:
            offloaded = moved.offloaded_bytes + num_bytes
            self.traffic = replace(moved, offloads=moved.offloads + 1, offloaded_bytes=offloaded)
        else:
            uploaded = moved.uploaded_bytes + num_bytes
            self.traffic = replace(moved, uploads=moved.uploads + 1, uploaded_bytes=uploaded)

    # -- Tiers

    def is_coming(self, name: int) -> bool:
        """Returns whether a block of this name is on its way to the device."""
        flights = self._in_flight.values()
        return any(name == each.name for flight in flights if flight.back for each in flight.order.names)

    def bring_back(self, held: SequenceState, names: Sequence[int], first: int, back: Return) -> None:
        """Begins to bring blocks of a sequence that holds as many on the device, from block ``first`` on."""
        assert self.tiers is not None
        end = first + len(back.tiers)
        blocks = tuple(map(self.tiers.block, names[first:end]))
        table = self.blocks.table(held.request_id)
        self.tiers.begin_return(names[first:end], back)
        copy = KVCopy(self._next_id(), Residency.DEVICE, (), tuple(table[first:end]), blocks, back.tiers)
        self._begin(held, copy, back, first)

    def _complete_return(self, flight: _Flight, back: Return, *, failed: bool) -> SequenceState | None:
        assert self.tiers is not None
        held, order, size = flight.held, flight.order, self.blocks.block_size
        good, seconds = self.tiers.outcomes.pop(order.copy_id, (0 if failed else len(order.names), None))
        self.tiers.returned([each.name for each in order.names], back, good, seconds)
        if held is None:
            self.blocks.release(_orphan(order.copy_id))
            return None
        held.copy_id, held.status = None, SequenceStatus.PAUSED
        held.computed_len = (flight.first + good) * size
        held.register_at = (flight.first + 1) * size
        if good and held.brought is None and held.cached_len is not None:
            num_tokens = min(held.computed_len, held.prompt_len) - held.cached_len
            slowest = max(back.tiers[:good])
            held.brought = Brought(num_tokens, slowest, seconds or 0.0, back.compute_s or 0.0)
            self.num_brought += num_tokens
            held.cached_len += num_tokens
        return held

    def keep(self, held: SequenceState, names: Sequence[int], first: int, end: int) -> None:
        """Has the registered blocks ``first`` to ``end - 1`` of a sequence saved, unless they serve it alone."""
        if self.tiers is None or not held.shares:
            return
        if held.is_kept:
            parents = (names[i - 1] if i else NO_PARENT for i in range(first, end))
            self.tiers.keep(map(BlockName, names[first:end], parents, itertools.repeat(held.tenant)))
        else:
            self.tiers.pass_over(names[first:end])

    def order_saves(self) -> None:
        """Begins the next saves, beside the steps; one for each tier is under way at a time."""
        if self.tiers is None:
            return
        for to in (Residency.HOST, Residency.DISK):
            save = None if to in self._saving else self.tiers.next_save(to, self.blocks.caches)
            if save is None:
                continue
            source: tuple[int, ...] = ()
            if save.source is Residency.DEVICE:
                source = tuple(self.blocks.match([block.name], 1)[0] for block in save.blocks)
                self.blocks.begin_reading(source)
            copy = KVCopy(self._next_id(), to, source, (), save.blocks)
            self._saving[to] = copy.copy_id, save
            self._saves.append(copy)

    def _complete_save(self, copy_id: int, *, failed: bool) -> None:
        assert self.tiers is not None
        (save,) = (save for number, save in self._saving.values() if number == copy_id)
        del self._saving[save.to]
        num_good, _ = self.tiers.outcomes.pop(copy_id, (0 if failed else len(save.blocks), None))
        spoiled = self.blocks.end_reading() if save.source is Residency.DEVICE else frozenset()
        self.tiers.saved(save, num_good, spoiled)

    # -- Integrity

    def orphaned_blocks(self) -> set[int]:
        """Returns the device's blocks of copies whose sequences are gone."""
        return {block for copy_id in self._in_flight for block in self.blocks.table(_orphan(copy_id))}

    def check_integrity(self, sequences: dict[str, SequenceState]) -> None:
        """Raises IntegrityError unless copies and sequences agree, and all host blocks are accounted for."""
        flying = {held.copy_id for held in sequences.values() if held.copy_id is not None}
        wanted = {copy_id for copy_id, flight in self._in_flight.items() if flight.held is not None}
        if flying != wanted:
            raise IntegrityError(f"copies {flying} are waited for, {wanted} are in flight")
        if self.tiers is not None:
            self.tiers.check_integrity()
        if self.host is None:
            return
        self.host.check_integrity()
        owners = {*sequences, *map(_orphan, self._in_flight)}
        used = sum(len(self.host.table(owner)) for owner in owners)
        if used + self.host.num_free != self.host.num_blocks:
            raise IntegrityError(f"{used} host blocks held by known sequences, {self.host.num_free} free")


def _orphan(copy_id: int) -> str:
    """Names the holder of the blocks of a copy in flight whose sequence is gone; no request id contains a NUL."""
    return f"\0copy {copy_id}"
