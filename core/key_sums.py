"""Sets of attempts that two components compare without naming what is in them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from functools import lru_cache
from hashlib import blake2b
from zlib import crc32

from farsight.core.messages.requests import Key

NUM_PARTS = 256
"""A set has so many parts: of 10,000 requests, those of one part that differs are about 40."""


def part_of(request_id: str) -> int:
    """Returns the part in which all attempts of a request are."""
    return crc32(request_id.encode()) % NUM_PARTS


class KeySums:
    """One attempt each of some requests, and the sum of each part of them. A change costs O(1), a comparison O(parts).

    Sets with the same sums are taken for equal. The sums are of 64 bits and of a hash that does not add up by chance.
    """

    def __init__(self) -> None:
        self._parts: dict[int, dict[str, int]] = {}  # attempts by request
        # In the machine's own byte order: between two orders every part differs, which costs time and nothing else.
        self._sums = array("Q", bytes(8 * NUM_PARTS))

    def put(self, request_id: str, attempt: int) -> None:
        """Adds an attempt in place of the request's earlier one."""
        number, hashed = _place(request_id, attempt)
        part = self._parts.setdefault(number, {})
        earlier = part.get(request_id)
        if earlier == attempt:
            return
        if earlier is not None:
            hashed ^= _place(request_id, earlier)[1]
        part[request_id] = attempt
        self._sums[number] ^= hashed

    def discard(self, request_id: str) -> None:
        """Removes a request, if it is here."""
        attempt = self._parts.get(part_of(request_id), {}).pop(request_id, None)
        if attempt is not None:
            number, hashed = _place(request_id, attempt)
            self._sums[number] ^= hashed

    def packed(self) -> bytes:
        """Returns the sums of all parts, ``8 * NUM_PARTS`` bytes, for ``differing`` elsewhere."""
        return self._sums.tobytes()

    def differing(self, packed: bytes) -> tuple[int, ...]:
        """Returns the parts in which another set differs from this one, by its sums; all if it has another form."""
        if len(packed) != 8 * NUM_PARTS:
            return tuple(range(NUM_PARTS))
        others = array("Q", packed)
        if others == self._sums:
            return ()
        return tuple(number for number in range(NUM_PARTS) if others[number] != self._sums[number])

    def keys(self, parts: Iterable[int]) -> Iterator[Key]:
        """Yields the attempts in these parts."""
        return (key for number in parts for key in self._parts.get(number, {}).items())

    def all_keys(self) -> Iterator[Key]:
        """Yields all attempts."""
        return self.keys(self._parts)


@lru_cache(maxsize=1 << 14)
def _place(request_id: str, attempt: int) -> tuple[int, int]:
    """Returns the part of an attempt and its summand; four sets or more have each attempt, so results are kept."""
    digest = blake2b(f"{request_id}/{attempt}".encode(), digest_size=8).digest()
    return part_of(request_id), int.from_bytes(digest, "little")
