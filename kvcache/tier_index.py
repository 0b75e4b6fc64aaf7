"""Which blocks lie in one tier below the device, by owner, and which of them leaves first."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from farsight.core.messages.kv import BlockName


class TierIndex:
    """The blocks of one tier, least recently used first.

    Who touches a chain does so from its end, so that a block leaves before its parent.

    Args:
        capacity: Most blocks.
        quota: Most blocks of one owner; 0 for no limit of its own.
    """

    def __init__(self, capacity: int, quota: int = 0) -> None:
        self.capacity, self.quota = capacity, quota or capacity
        self._by_owner: dict[str, dict[int, tuple[int, BlockName]]] = {}
        self._owners: dict[int, str] = {}  # by name
        self._uses = 0

    def __len__(self) -> int:
        return len(self._owners)

    def __contains__(self, name: int) -> bool:
        return name in self._owners

    def blocks(self) -> Iterator[BlockName]:
        """Yields all blocks, owner by owner, least recently used first."""
        for entries in self._by_owner.values():
            yield from (block for _, block in entries.values())

    def block(self, name: int) -> BlockName:
        """Returns the full name of a block that is here."""
        return self._by_owner[self._owners[name]][name][1]

    def num_blocks(self, owner: str) -> int:
        """Returns how many blocks an owner has."""
        return len(self._by_owner.get(owner, ()))

    def put(self, block: BlockName) -> None:
        """Adds a block, or counts another use of it; it keeps its first owner."""
        known = self.remove(block.name)
        block = block if known is None else known
        self._uses += 1
        self._owners[block.name] = block.owner
        self._by_owner.setdefault(block.owner, {})[block.name] = (self._uses, block)

    def touch(self, names: Iterable[int]) -> None:
        """Counts a use of each block that is here, the first as the oldest."""
        owners, by_owner, uses = self._owners, self._by_owner, self._uses
        for name in names:  # thousands a turn
            owner = owners.get(name)
            if owner is not None:
                uses += 1
                entries = by_owner[owner]
                entries[name] = uses, entries.pop(name)[1]
        self._uses = uses

    def remove(self, name: int) -> BlockName | None:
        """Takes a block out; None if it is not here."""
        owner = self._owners.pop(name, None)
        if owner is None:
            return None
        entries = self._by_owner[owner]
        _, block = entries.pop(name)
        if not entries:
            del self._by_owner[owner]
        return block

    def excess(self, owner: str, apart: Collection[int]) -> BlockName | None:
        """Takes out the block that leaves next if the tier or this owner has too many; None if neither has.

        Args:
            apart: Names of blocks that leave after all others.
        """
        if self.num_blocks(owner) > self.quota:
            return self.remove(self._oldest((owner,), apart))
        return self.remove(self._oldest(self._by_owner, apart)) if len(self) > self.capacity else None

    def _oldest(self, owners: Iterable[str], apart: Collection[int]) -> int:
        heads = []
        for owner in owners:
            entries = self._by_owner[owner]
            head = next((entry for name, entry in entries.items() if name not in apart), None)
            first = next(iter(entries.values()))
            heads.append((head is None, *(first if head is None else head)))
        return min(heads)[2].name
