"""Which sequences hold which KV block, and which cached contents unheld blocks still have.

The content of a full block has a name, the chained hash of its token ids, which is the same in every process.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

from farsight.core.errors import IntegrityError

BlockHashes = Callable[[str, int], Sequence[int]]
"""(request id, n) -> at least the first n block hashes of a sequence, all of whose first n blocks are known."""

NO_PARENT = 0
"""Parent of a sequence's first block."""

_HASH_BYTES = 8


def extend_hashes(
    hashes: list[int], token_ids: Sequence[int], block_size: int, num_blocks: int, root: int = NO_PARENT
) -> None:
    """Appends to ``hashes`` (of the first blocks) until there are ``num_blocks``.

    Each hash covers all tokens up to the end of its block.

    Args:
        token_ids: At least ``num_blocks * block_size`` ids, each below 2**32.
        root: Parent of the first block; sequences of different roots share nothing.
    """
    if len(hashes) >= num_blocks:
        return
    pack = struct.Struct(f"<{block_size}I").pack
    parent = (hashes[-1] if hashes else root).to_bytes(_HASH_BYTES, "little")
    for start in range(len(hashes) * block_size, num_blocks * block_size, block_size):
        content = pack(*token_ids[start : start + block_size])
        parent = blake2b(parent + content, digest_size=_HASH_BYTES).digest()
        hashes.append(int.from_bytes(parent, "little"))


def root_of(name: str, kind: bytes = b"") -> int:
    """Returns the root hash of a name; each name of each kind has a root of its own."""
    return int.from_bytes(blake2b(name.encode(), digest_size=_HASH_BYTES, person=kind).digest(), "little")


def salted_root(cache_salt: str) -> int:
    """Returns the root hash of requests with this salt; requests without a salt share the common root."""
    return root_of(cache_salt, b"salt") if cache_salt else NO_PARENT


def hash_blocks(token_ids: Sequence[int], block_size: int, root: int = NO_PARENT) -> list[int]:
    """Returns the hashes of all full blocks."""
    hashes: list[int] = []
    extend_hashes(hashes, token_ids, block_size, len(token_ids) // block_size, root)
    return hashes


def are_hashes_of(hashes: Sequence[int], token_ids: Sequence[int], block_size: int, root: int = NO_PARENT) -> bool:
    """Returns whether these are the hashes of all full blocks; checks number, first and last alone. O(block)."""
    num_blocks = len(token_ids) // block_size
    if len(hashes) != num_blocks:
        return False
    first: list[int] = []
    extend_hashes(first, token_ids, block_size, min(1, num_blocks), root)
    last = list(hashes[: num_blocks - 1])
    extend_hashes(last, token_ids, block_size, num_blocks, root)
    return first == list(hashes[:1]) and last[num_blocks - 1 :] == list(hashes[num_blocks - 1 :])


class BlockManager:
    """Hands out fixed-size KV blocks; the only truth about which sequence holds them.

    A full block may be registered under the hash of all tokens up to its end. Sequences that begin with the same
    tokens then share it; when no sequence holds it any more, it stays cached and counts as free until it is evicted.
    A sequence that holds a registered block holds its predecessors too, so a chain is only ever evicted from its end.

    Args:
        num_blocks: Blocks in the pool.
        block_size: Tokens a block holds.
        block_bytes: Bytes of a block; only the reported sizes of copies depend on it.
        most_sequences: Sequences that may hold blocks at once, since each has a state beside; 0: any number.
    """

    def __init__(self, num_blocks: int, block_size: int, block_bytes: int = 0, most_sequences: int = 0) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks: got {num_blocks} of {block_size} tokens")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.block_bytes = block_bytes
        self._most_sequences = most_sequences
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the lowest block is handed out first
        self._tables: dict[str, list[int]] = {}
        self._ref_counts = [0] * num_blocks
        self._cached: dict[int, int] = {}  # hash -> block
        self._names: dict[int, tuple[int, int]] = {}  # cached block -> its hash and its parent's
        self._idle: dict[int, None] = {}  # cached blocks that no sequence holds, least recently used first
        self._changed: dict[int, int] | None = None  # names that have come or gone, latest last -> their parents
        self._changed_too_much = False
        self._reading: set[int] = set()
        self._spoiled: set[int] = set()  # names of blocks evicted before they were read

    @property
    def num_free(self) -> int:
        """Blocks that no sequence holds, cached ones included."""
        return len(self._free) + len(self._idle)

    @property
    def num_shared(self) -> int:
        """Entries of all block tables together, less the blocks that are held."""
        return sum(map(len, self._tables.values())) - (self.num_blocks - self.num_free)

    def blocks_for(self, num_tokens: int) -> int:
        """Returns the number of blocks that ``num_tokens`` tokens need."""
        return -(-num_tokens // self.block_size)

    def table(self, sequence_id: str) -> list[int]:
        """Returns the sequence's blocks in token order (shared, not a copy); empty if it holds none."""
        return self._tables.get(sequence_id, [])

    def holds_any(self, sequence_id: str) -> bool:
        """Returns whether the sequence holds a block."""
        return sequence_id in self._tables

    @property
    def may_begin(self) -> bool:
        """Whether another sequence may hold blocks."""
        return not self._most_sequences or len(self._tables) < self._most_sequences

    def shortage(self, sequence_id: str, num_tokens: int) -> int:
        """Returns the number of blocks that the sequence lacks to hold ``num_tokens`` tokens in all."""
        needed = -(-num_tokens // self.block_size) - len(self._tables.get(sequence_id, ()))
        return needed if needed > 0 else 0

    def grow(self, sequence_id: str, num_tokens: int) -> list[int] | None:
        """Gives the sequence blocks for ``num_tokens`` tokens in all; cached ones are evicted last.

        Returns:
            The sequence's table (shared, not a copy). None if too few blocks are free; nothing changes then.
        """
        table = self._tables.get(sequence_id)
        if table is not None and num_tokens <= len(table) * self.block_size:
            return table  # as most decodes find it
        needed = -(-num_tokens // self.block_size) - (0 if table is None else len(table))
        if needed > len(self._free) + len(self._idle):
            return None
        if table is None:
            table = []
            if needed > 0:
                self._tables[sequence_id] = table
        if needed > 0:
            blocks = self._free[: -needed - 1 : -1]
            del self._free[len(self._free) - len(blocks) :]
            blocks += [self._evict() for _ in range(needed - len(blocks))]
            for block in blocks:
                self._ref_counts[block] = 1
            table += blocks
        return table

    def _evict(self) -> int:
        block = next(iter(self._idle))
        del self._idle[block]
        name, parent = self._names.pop(block)
        del self._cached[name]
        if block in self._reading:
            self._spoiled.add(name)
        if self._changed is not None:
            self._note(self._changed, name, parent)
        return block

    def begin_reading(self, blocks: Iterable[int]) -> None:
        """Notes cached blocks that are read from now on, beside the steps. They are evicted like any others."""
        self._reading = set(blocks)

    def has_read(self, block: int, name: int) -> bool:
        """Ends the reading of one block, in any thread; False if it was evicted before: what was read may be another's.

        A block is evicted before a step overwrites it, and each line here is one operation of the interpreter.
        """
        self._reading.discard(block)
        return name not in self._spoiled

    def end_reading(self) -> frozenset[int]:
        """Ends the reading of all blocks; returns the names of the blocks that were evicted before they were read."""
        spoiled, self._reading, self._spoiled = frozenset(self._spoiled), set(), set()
        return spoiled

    def match(self, hashes: Sequence[int], limit: int) -> list[int]:
        """Returns the cached blocks of the longest cached beginning of ``hashes[:limit]``."""
        blocks = []
        for i in range(limit):
            block = self._cached.get(hashes[i])
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_held(self, blocks: Sequence[int]) -> int:
        """Counts the blocks that a sequence already holds: sharing these costs no free block."""
        return sum(self._ref_counts[block] > 0 for block in blocks)

    def share(self, sequence_id: str, blocks: Sequence[int]) -> None:
        """Begins the block table of a sequence that holds no blocks with cached blocks, from ``match``."""
        if blocks:
            self._tables[sequence_id] = list(blocks)
        for block in blocks:
            self._hold(block)

    def _hold(self, block: int) -> None:
        self._ref_counts[block] += 1
        self._idle.pop(block, None)

    def register(self, sequence_id: str, first: int, hashes: Sequence[int], end: int) -> None:
        """Names the sequence's blocks ``first`` to ``end - 1``, which are full and computed; earlier blocks have names.

        If a block of the same content is registered already, the table takes that block, and the new one is freed.
        """
        table = self._tables[sequence_id]
        for i in range(first, end):
            known = self._cached.get(hashes[i])
            if known is None:
                parent = hashes[i - 1] if i else NO_PARENT
                self._cached[hashes[i]] = table[i]
                self._names[table[i]] = hashes[i], parent
                if self._changed is not None:
                    self._note(self._changed, hashes[i], parent)
            elif known != table[i]:
                self._hold(known)
                self._drop(table[i])
                table[i] = known

    def watch(self) -> None:
        """Starts to record which cached blocks come and go."""
        self._changed = {}

    def _note(self, changed: dict[int, int], name: int, parent: int) -> None:
        if len(changed) > self.num_blocks:
            changed.clear()
            self._changed_too_much = True
        changed.pop(name, None)
        changed[name] = parent

    def take_changes(self) -> dict[int, int] | None:
        """Takes the names that have come or gone since the last call, the latest last, and their parents.

        Among the names that are cached now a parent comes before its successors, among the evicted names after them.
        None if more names have changed than the pool has blocks.
        """
        changed, self._changed = self._changed or {}, {}
        too_much, self._changed_too_much = self._changed_too_much, False
        return None if too_much else changed

    def caches(self, name: int) -> bool:
        """Returns whether a block of this name is cached, held or not."""
        return name in self._cached

    def cached_chain(self) -> list[tuple[int, int]]:
        """Returns the names of all cached blocks and their parents: parents first, recently used last. O(blocks)."""
        chain: dict[int, int] = {}
        for block in [*self._idle, *(block for block in self._names if block not in self._idle)]:
            above: list[tuple[int, int]] = []
            name, parent = self._names[block]
            while name not in chain:
                above.append((name, parent))
                if parent == NO_PARENT:
                    break
                name, parent = self._names[self._cached[parent]]
            chain.update(reversed(above))
        return list(chain.items())

    def hand_over(self, sequence_id: str, heir: str) -> None:
        """Gives all blocks of the sequence, if any, to ``heir``, which holds none."""
        if sequence_id in self._tables:
            self._tables[heir] = self._tables.pop(sequence_id)

    def release(self, sequence_id: str) -> int:
        """Takes back all blocks of the sequence; returns how many."""
        blocks = self._tables.pop(sequence_id, [])
        if self._names:
            for block in reversed(blocks):
                self._drop(block)
        else:  # nothing is cached, so nothing is shared
            for block in blocks:
                self._ref_counts[block] = 0
            self._free += reversed(blocks)
        return len(blocks)

    def _drop(self, block: int) -> None:
        self._ref_counts[block] -= 1
        if self._ref_counts[block]:
            return
        if block in self._names:
            self._idle[block] = None
        else:
            self._free.append(block)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless blocks, reference counts, names and the order of eviction agree."""
        counts = [0] * self.num_blocks
        for table in self._tables.values():
            for block in table:
                counts[block] += 1
        if counts != self._ref_counts:
            raise IntegrityError(f"blocks are held {counts} times, reference counts say {self._ref_counts}")
        held = [block for block, count in enumerate(counts) if count]
        if sorted([*held, *self._free, *self._idle]) != list(range(self.num_blocks)):
            raise IntegrityError(
                f"{len(held)} held + {len(self._free)} free + {len(self._idle)} idle blocks are not the "
                f"{self.num_blocks} of the pool"
            )
        if not all(self._tables.values()):
            raise IntegrityError("a sequence has an empty block table")
        self._check_shared(counts)
        self._check_names()

    def _check_shared(self, counts: list[int]) -> None:
        for sequence_id, table in self._tables.items():
            named = [block in self._names for block in table]
            if named != sorted(named, reverse=True):
                raise IntegrityError(f"{sequence_id}: a registered block follows one that is not")
            if any(counts[block] > 1 and not is_named for block, is_named in zip(table, named, strict=True)):
                raise IntegrityError(f"{sequence_id}: shares a block that is not registered")

    def _check_names(self) -> None:
        if {block: name for name, block in self._cached.items()} != {b: own for b, (own, _) in self._names.items()}:
            raise IntegrityError("the index of hashes and the names of blocks differ")
        if not self._idle.keys() <= self._names.keys():
            raise IntegrityError("a cached block has no name")
        order = {block: i for i, block in enumerate(self._idle)}
        for block, (_, parent) in self._names.items():
            if parent == NO_PARENT:
                continue
            if parent not in self._cached:
                raise IntegrityError(f"block {block} is cached without its predecessor")
            before = self._cached[parent]
            if before in order and order[before] < order.get(block, self.num_blocks):
                raise IntegrityError(f"block {before} would be evicted before its successor {block}")
