"""KV that outlives its request: which blocks lie in which tier below the device's pool, and what comes back.

A block that no sequence holds any more stays cached on the device until its memory is needed. Here is what lies below:
a host tier, and files on a disk. The object decides and counts; a shell moves the bytes. It knows no clock: ``now``
comes in, and so do the seconds that moves took. The simulator and the worker run the same object.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from farsight.core.errors import IntegrityError, InvalidValueError
from farsight.core.messages.kv import BlockName
from farsight.core.request import Residency
from farsight.kvcache.tier_index import TierIndex

HOUR_S = 3600.0

MOST_SAVED = 256
"""Most blocks of one order to save. An order begins between two steps and runs beside them, so that a step may fill no
more blocks than this: thousands of tokens. The shell copies a few blocks at a time, so that they take little memory."""

EAGER_SHARE = 0.5
"""Share of the hour's writes that is kept until the host tier is nearly full: blocks that leave it would be lost."""

NEARLY_FULL = 0.75

MANY_RETURN = 0.1
"""Share of requests that continue an earlier one from which on all are saved; below it, only those that do."""

MOST_PASSED_OVER = 1 << 16
"""Most names kept of blocks that were not saved, to see whether they are asked for again."""

_FEW_UNSAVED = 1024

MEMORY = 0.9
"""Weight of what was measured before, at each new measurement of a price."""

RETURNS_MEMORY = 0.95
"""Weight of earlier requests in the share of those that continue one."""


@dataclass(frozen=True, slots=True)
class TierLimits:
    """
    Attributes:
        host_blocks: Blocks of the host tier; 0 for none.
        disk_blocks: Blocks of the disk tier; 0 for none.
        owner_blocks: Blocks of one owner on the disk at most; 0 for no limit of its own.
        block_bytes: Bytes of a block.
        write_bytes_per_hour: Bytes written to the disk in an hour at most; 0 for no limit.
    """

    host_blocks: int = 0
    disk_blocks: int = 0
    owner_blocks: int = 0
    block_bytes: int = 0
    write_bytes_per_hour: int = 0

    def __post_init__(self) -> None:
        for each in fields(self):
            if getattr(self, each.name) < 0:
                raise InvalidValueError(each.name, getattr(self, each.name), "an integer >= 0")


@dataclass(slots=True)
class TierPrices:
    """What it takes to compute a token and to bring a block back, as measured.

    Attributes:
        prefill_token_s: Wall seconds of a prompt token at the present load: steps also decode. None before a step
            with prompts was measured.
        host_block_s, disk_block_s: Seconds of a block that comes back from the tier; 0 before it was measured.
    """

    prefill_token_s: float | None = None
    host_block_s: float = 0.0
    disk_block_s: float = 0.0
    _tokens: float = 0.0
    _prompt_s: float = 0.0

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Learns from a step; one that has computed no prompt tokens, or whose time is not known, says nothing."""
        if not num_tokens or not seconds:
            return
        self._tokens = MEMORY * self._tokens + num_tokens
        self._prompt_s = MEMORY * self._prompt_s + seconds
        self.prefill_token_s = self._prompt_s / self._tokens

    def brought(self, num_host: int, num_disk: int, seconds: float) -> None:
        """Learns from blocks that came back together; the disk took what the host tier's do not explain."""
        if num_disk:
            own_s = max(0.0, seconds - num_host * self.host_block_s) / num_disk
            self.disk_block_s = _blend(self.disk_block_s, own_s)
        else:
            self.host_block_s = _blend(self.host_block_s, seconds / num_host)

    def block_s(self, tier: Residency) -> float:
        """Returns the seconds of a block that comes back from this tier."""
        return self.disk_block_s if tier is Residency.DISK else self.host_block_s


def _blend(known: float, new: float) -> float:
    return MEMORY * known + (1 - MEMORY) * new if known else new


@dataclass(frozen=True, slots=True)
class TierCounts:
    """Blocks so far; the numbers only rise.

    Attributes:
        host_saved, disk_saved: Written to the tier.
        host_brought, disk_brought: Brought back from it.
        damaged: Found damaged, short or missing when they were read, and dropped.
        evicted: Dropped from the disk for want of room.
        unsaved: Lost before they were saved, as where the hour's bytes are used up.
    """

    host_saved: int = 0
    disk_saved: int = 0
    host_brought: int = 0
    disk_brought: int = 0
    damaged: int = 0
    evicted: int = 0
    unsaved: int = 0


class Return(NamedTuple):
    """Blocks of a prompt that are worth bringing back: those that follow what the device has.

    Attributes:
        tiers: Where each block lies, in their order.
        seconds: Expected seconds to bring them back, behind what comes back already.
        compute_s: Expected seconds to compute them; None before anything was measured.
        own_s: Expected seconds of these blocks alone, behind nothing.
    """

    tiers: tuple[Residency, ...]
    seconds: float
    compute_s: float | None
    own_s: float


class Save(NamedTuple):
    """An order to write blocks to a lower tier.

    Attributes:
        source: DEVICE, or HOST for blocks that go on to the disk.
        to: HOST, or DISK; from the device to the disk only where the host has no tier.
    """

    source: Residency
    to: Residency
    blocks: tuple[BlockName, ...]


class KVTiers:
    """The tiers below one device's pool.

    Shell protocol, all between steps: ``tick``; ``keep`` when a sequence has filled blocks, and all of them when it
    has ended; ``next_save`` for each tier, answered by ``saved``; ``worth`` for a sequence about to start, then
    ``begin_return`` and ``returned``; ``take_dropped`` gives what is to be deleted.

    Attributes:
        host, disk: What lies there.
        counts: Blocks moved so far.
        outcomes: By the number of a copy, how many of its blocks, the first ones, were moved as they were, and in how
            many seconds. The shell says so where it is not all of them, or where it has measured.
    """

    def __init__(self, limits: TierLimits, prices: TierPrices | None = None) -> None:
        self.limits = limits
        self.prices = TierPrices() if prices is None else prices
        self.host = TierIndex(limits.host_blocks)
        self.disk = TierIndex(limits.disk_blocks, min(limits.owner_blocks, limits.disk_blocks))
        self.counts = TierCounts()
        self.outcomes: dict[int, tuple[int, float | None]] = {}
        self._return_share = 1.0  # before anything is known, all is saved
        self._passed_over: dict[int, None] = {}  # the latest last
        self._unsaved: dict[int, BlockName] = {}  # in the order in which they are saved
        self._most_unsaved = _FEW_UNSAVED
        self._leaving: deque[BlockName] = deque()  # of the host tier, on to the disk
        self._saving: set[int] = set()
        self._waiting: dict[str, tuple[int, ...]] = {}
        self._apart: Counter[int] = Counter()  # names of waiting turns, and of blocks on their way
        self._coming_s = 0.0
        self._dropped: list[tuple[Residency, BlockName]] = []
        self._now = 0.0
        self._may_write = float(limits.write_bytes_per_hour)

    def count(self, **more: int) -> None:
        """Adds to ``counts``."""
        self.counts = replace(self.counts, **{name: getattr(self.counts, name) + n for name, n in more.items()})

    def tick(self, now: float) -> None:
        """Says the time, in seconds of a monotonic clock."""
        per_hour = self.limits.write_bytes_per_hour
        self._may_write = min(per_hour, self._may_write + per_hour * max(0.0, now - self._now) / HOUR_S)
        self._now = max(self._now, now)

    def learn(self, blocks: Iterable[BlockName]) -> None:
        """Takes over blocks that lie on the disk, least recently used first: at a start, or from another worker."""
        for block in blocks:
            self.disk.put(block)
            self._bound(Residency.DISK, block.owner)

    def tier_of(self, name: int) -> Residency | None:
        """Returns the fastest tier that holds a block; None where none does."""
        if name in self.host:
            return Residency.HOST
        return Residency.DISK if name in self.disk else None

    def block(self, name: int) -> BlockName:
        """Returns the full name of a block that a tier holds."""
        index = self.host if name in self.host else self.disk
        return index.block(name)

    # -- Upwards

    def wait(self, request_id: str, names: Sequence[int]) -> None:
        """Keeps the blocks of a turn that waits apart: they leave after all others. ``leave`` ends that."""
        if request_id not in self._waiting:
            self._waiting[request_id] = tuple(names)
            self._apart.update(names)
            self._touch(names)

    def leave(self, request_id: str) -> None:
        """Ends ``wait``: the turn has started, or is gone."""
        self._release(self._waiting.pop(request_id, ()))

    def _release(self, names: Iterable[int]) -> None:
        for name in names:
            self._apart[name] -= 1
            if not self._apart[name]:
                del self._apart[name]

    def _touch(self, names: Sequence[int]) -> None:
        for index in (self.host, self.disk):
            if len(index):
                index.touch(reversed(names))

    def worth(self, names: Sequence[int], first: int, end: int, block_size: int, num_held: int = 1) -> Return | None:
        """Returns the blocks from ``first`` on that come back cheaper than they are computed; None if none does.

        Among all beginnings of the chain that lies below without a gap, it is the one that saves most. Before a price
        is known, what lies below comes back.

        Args:
            num_held: Sequences that wait for the device, this one included: what it computes delays them all, and what
                comes back meanwhile delays this one alone.
        """
        token_s = self.prices.prefill_token_s
        computed_s = 0.0 if token_s is None else token_s * block_size
        tiers: list[Residency] = []
        seconds, best, best_s, most_saved = self._coming_s, 0, 0.0, 0.0
        for name in names[first:end]:
            tier = self.tier_of(name)
            if tier is None:
                break
            tiers.append(tier)
            seconds += self.prices.block_s(tier)
            saved = len(tiers) * computed_s * num_held - seconds
            if token_s is None or saved > most_saved:
                best, best_s, most_saved = len(tiers), seconds, saved
        if not best:
            return None
        own_s = best_s - self._coming_s
        return Return(tuple(tiers[:best]), best_s, None if token_s is None else computed_s * best, own_s)

    def begin_return(self, names: Sequence[int], expected: Return) -> None:
        """Books that these blocks are on their way to the device."""
        self._apart.update(names)
        self._touch(names)
        self._coming_s += expected.own_s

    def returned(self, names: Sequence[int], expected: Return, num_good: int, seconds: float | None = None) -> None:
        """Books the end of a return.

        Args:
            names: As of ``begin_return``.
            num_good: The first so many blocks came back; the one after them was damaged or missing.
            seconds: What it took; None where the shell has not measured it.
        """
        self._release(names)
        self._coming_s = max(0.0, self._coming_s - expected.own_s)  # as it was booked, whatever prices are by now
        tiers = Counter(expected.tiers[:num_good])
        self.count(host_brought=tiers[Residency.HOST], disk_brought=tiers[Residency.DISK])
        if num_good < len(names):
            self.lost(names[num_good])
        if seconds is not None and num_good:
            self.prices.brought(tiers[Residency.HOST], tiers[Residency.DISK], seconds)

    def lost(self, name: int) -> None:
        """Drops a block that was damaged, short or missing; its successors are of no use until it is saved again."""
        self.count(damaged=1)
        for tier, index in ((Residency.HOST, self.host), (Residency.DISK, self.disk)):
            block = index.remove(name)
            if block is not None:
                self._dropped.append((tier, block))

    # -- Downwards

    def pays(self, names: Sequence[int], first: int) -> bool:
        """Returns whether a sequence that starts is worth saving; learns how many continue an earlier one.

        Writing a block costs time of a processor, which is lost where no request continues another.

        Args:
            names: Names of its full blocks.
            first: Number of them that are on the device.
        """
        end = first
        while end < len(names) and (self.tier_of(names[end]) is not None or names[end] in self._passed_over):
            end += 1
        continues = 0 < len(names) <= 2 * end
        self._return_share = RETURNS_MEMORY * self._return_share + (1 - RETURNS_MEMORY) * continues
        return continues or self._return_share >= MANY_RETURN

    def pass_over(self, names: Iterable[int]) -> None:
        """Notes blocks that are not saved."""
        self._passed_over.update(dict.fromkeys(names))
        while len(self._passed_over) > MOST_PASSED_OVER:
            del self._passed_over[next(iter(self._passed_over))]

    def keep(self, blocks: Iterable[BlockName]) -> None:
        """Has full blocks of a sequence saved, parents first, and counts another use of those that a tier has."""
        known = []
        for block in blocks:
            if self.tier_of(block.name) is not None:
                known.append(block.name)
            elif block.name not in self._saving:
                self._unsaved.setdefault(block.name, block)
        self._touch(known)

    def next_save(self, to: Residency, is_cached: Callable[[int], bool]) -> Save | None:
        """Returns the next order to save blocks to a tier; None where nothing is to be saved, or may be written now.

        Blocks go to the host, and from there to the disk; where the host has no tier, from the device to the disk.

        Args:
            is_cached: Whether the device still has a block.
        """
        has_host = bool(self.limits.host_blocks)
        if to is Residency.HOST:
            # No more than a part of the tier at once: what leaves it must have been written to the disk before.
            blocks = self._take_unsaved(is_cached, max(1, self.limits.host_blocks // 4)) if has_host else []
        elif has_host:
            blocks = self._take_leaving()
        else:
            blocks = self._take_unsaved(is_cached, self._room_to_write(0.0))
        if not blocks:
            return None
        if to is Residency.DISK:
            self._may_write -= len(blocks) * self.limits.block_bytes
        self._saving.update(block.name for block in blocks)
        from_host = has_host and to is Residency.DISK
        return Save(Residency.HOST if from_host else Residency.DEVICE, to, tuple(blocks))

    def _room_to_write(self, kept_share: float) -> int:
        """Counts the blocks that may be written to the disk now, besides a share of the hour's bytes."""
        per_hour, size = self.limits.write_bytes_per_hour, self.limits.block_bytes
        if not self.limits.disk_blocks:
            return 0
        if not per_hour or not size:
            return MOST_SAVED
        return max(0, int(self._may_write - kept_share * per_hour) // size)

    def _take_leaving(self) -> list[BlockName]:
        is_full = len(self.host) >= NEARLY_FULL * self.host.capacity
        room = min(MOST_SAVED, self._room_to_write(0.0 if is_full else EAGER_SHARE))
        blocks = list[BlockName]()
        while self._leaving and len(blocks) < room:
            block = self._leaving.popleft()
            if block.name in self.host and block.name not in self.disk and block.name not in self._saving:
                blocks.append(block)
        return blocks

    def _take_unsaved(self, is_cached: Callable[[int], bool], most: int) -> list[BlockName]:
        if len(self._unsaved) > self._most_unsaved:  # blocks that the device has evicted may lie behind the first
            known = len(self._unsaved)
            self._unsaved = {name: block for name, block in self._unsaved.items() if is_cached(name)}
            self._most_unsaved = max(_FEW_UNSAVED, 2 * len(self._unsaved))
            self.count(unsaved=known - len(self._unsaved))
        room, blocks = min(MOST_SAVED, most), list[BlockName]()
        while self._unsaved and len(blocks) < room:
            name = next(iter(self._unsaved))
            block = self._unsaved.pop(name)
            if is_cached(name):
                blocks.append(block)
            else:
                self.count(unsaved=1)
        return blocks

    def saved(self, save: Save, num_good: int | None = None, spoiled: Collection[int] = ()) -> None:
        """Books the end of an order to save blocks; what could not be written is no longer tried.

        Args:
            num_good: The first so many blocks were written; None for all.
            spoiled: Names of blocks that were overwritten before they were read.
        """
        self._saving.difference_update(block.name for block in save.blocks)
        good = [block for block in save.blocks[:num_good] if block.name not in spoiled]
        self.count(unsaved=len(save.blocks) - len(good))
        if save.to is Residency.HOST:
            self.count(host_saved=len(good))
            if self.limits.disk_blocks:
                self._leaving.extend(good)
        else:
            self.count(disk_saved=len(good))
        index = self.host if save.to is Residency.HOST else self.disk
        for block in reversed(good):
            index.put(block)
        for owner in {block.owner for block in good}:
            self._bound(save.to, owner)

    def _bound(self, tier: Residency, owner: str) -> None:
        index = self.host if tier is Residency.HOST else self.disk
        while (block := index.excess(owner, self._apart)) is not None:
            self._dropped.append((tier, block))
            if tier is Residency.DISK:
                self.count(evicted=1)
            elif block.name not in self.disk:
                self.count(unsaved=1)

    def drop_owner(self, owner: str) -> None:
        """Drops all blocks of a tenant: his key is deleted, or an operator clears them."""
        for tier, index in ((Residency.HOST, self.host), (Residency.DISK, self.disk)):
            for block in [each for each in index.blocks() if each.owner == owner]:
                index.remove(block.name)
                self._dropped.append((tier, block))
        for block in [each for each in self._unsaved.values() if each.owner == owner]:
            del self._unsaved[block.name]

    def take_dropped(self) -> list[tuple[Residency, BlockName]]:
        """Takes the blocks whose bytes are to be deleted, and where."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every tier keeps its bounds and blocks apart belong to someone."""
        for index in (self.host, self.disk):
            if len(index) > index.capacity:
                raise IntegrityError(f"{len(index)} blocks in a tier of {index.capacity}")
        if min(self._apart.values(), default=1) < 1:
            raise IntegrityError("blocks are kept apart for no one")
