"""Names for the contents of full KV blocks: chained hashes of token ids, the same in every process."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from hashlib import blake2b

BlockHashes = Callable[[str, int], Sequence[int]]
"""(request id, n) -> at least the first n block hashes of a sequence, all of whose first n blocks are known."""

NO_PARENT = 0
"""Parent of a sequence's first block."""

_HASH_BYTES = 8


def extend_hashes(
    hashes: list[int], token_ids: Sequence[int], block_size: int, num_blocks: int, root: int = NO_PARENT
) -> None:
    """Appends to ``hashes`` (of the first blocks) until there are ``num_blocks``; each covers all tokens up to it.

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
    """A separate root hash for each name of a kind."""
    return int.from_bytes(blake2b(name.encode(), digest_size=_HASH_BYTES, person=kind).digest(), "little")


def salted_root(cache_salt: str) -> int:
    """Root hash of requests with this salt; requests without a salt share the common root."""
    return root_of(cache_salt, b"salt") if cache_salt else NO_PARENT


def hash_blocks(token_ids: Sequence[int], block_size: int, root: int = NO_PARENT) -> list[int]:
    """The hashes of all full blocks."""
    hashes: list[int] = []
    extend_hashes(hashes, token_ids, block_size, len(token_ids) // block_size, root)
    return hashes


def are_hashes_of(hashes: Sequence[int], token_ids: Sequence[int], block_size: int, root: int = NO_PARENT) -> bool:
    """Whether these are the hashes of all full blocks, as far as number, first and last one tell. O(block)."""
    num_blocks = len(token_ids) // block_size
    if len(hashes) != num_blocks:
        return False
    first: list[int] = []
    extend_hashes(first, token_ids, block_size, min(1, num_blocks), root)
    last = list(hashes[: num_blocks - 1])
    extend_hashes(last, token_ids, block_size, num_blocks, root)
    return first == list(hashes[:1]) and last[num_blocks - 1 :] == list(hashes[num_blocks - 1 :])
