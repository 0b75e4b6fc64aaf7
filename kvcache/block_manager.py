"""Which sequence holds which KV block."""

from __future__ import annotations

from core.errors import IntegrityError


class BlockManager:
    """Hands out fixed-size KV blocks; the only truth about who holds them.

    Args:
        num_blocks: Blocks in the pool.
        block_size: Tokens a block holds.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks: got {num_blocks} of {block_size} tokens")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the lowest block is handed out first
        self._tables: dict[str, list[int]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens fill."""
        return -(-num_tokens // self.block_size)

    def table(self, sequence_id: str) -> list[int]:
        """The sequence's blocks in token order (shared, not a copy); empty if it holds none."""
        return self._tables.get(sequence_id, [])

    def shortage(self, sequence_id: str, num_tokens: int) -> int:
        """Blocks the sequence lacks to hold ``num_tokens`` tokens in all."""
        return max(0, self.blocks_for(num_tokens) - len(self.table(sequence_id)))

    def grow(self, sequence_id: str, num_tokens: int) -> list[int] | None:
        """Gives the sequence blocks for ``num_tokens`` tokens in all.

        Returns:
            Its table (shared, not a copy); None, and nothing has changed, if too few blocks are free.
        """
        table = self._tables.get(sequence_id)
        needed = -(-num_tokens // self.block_size) - (0 if table is None else len(table))
        if needed > len(self._free):
            return None
        if table is None:
            table = []
            if needed > 0:
                self._tables[sequence_id] = table
        for _ in range(needed):
            table.append(self._free.pop())
        return table

    def release(self, sequence_id: str) -> int:
        """Takes back all blocks of the sequence; returns how many."""
        blocks = self._tables.pop(sequence_id, [])
        self._free.extend(reversed(blocks))
        return len(blocks)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every block is either free or held, exactly once."""
        held = [block for table in self._tables.values() for block in table]
        if sorted(held + self._free) != list(range(self.num_blocks)):
            raise IntegrityError(
                f"{len(held)} held + {len(self._free)} free blocks are not the {self.num_blocks} of the pool"
            )
        if not all(self._tables.values()):
            raise IntegrityError("a sequence has an empty block table")
