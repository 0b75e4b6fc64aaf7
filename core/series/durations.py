"""Counts of durations by size, from which percentiles are read with an error of at most 9 %."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

SHORTEST_S = 1e-4
PER_OCTAVE = 4
NUM_BUCKETS = 97
"""Bucket 0 holds up to 0.1 ms; each further bucket is a factor of 2^(1/4) wide; the last one begins at 1,394 s."""

BucketCounts = tuple[tuple[int, int], ...]
"""(bucket, durations in it), buckets rising."""


def bucket_of(duration_s: float) -> int:
    """Returns the bucket of a duration; the last bucket also holds all longer durations."""
    if duration_s <= SHORTEST_S:
        return 0
    return min(NUM_BUCKETS - 1, 1 + int(PER_OCTAVE * math.log2(duration_s / SHORTEST_S)))


def percentile_s(counts: Mapping[int, int], level: float) -> float | None:
    """Returns the duration below which a share ``level`` of the durations lies, in seconds; None without durations."""
    total = sum(counts.values())
    if not total:
        return None
    rank, seen = level * total, 0
    for bucket in sorted(counts):
        seen += counts[bucket]
        if seen >= rank:
            break
    return SHORTEST_S * 2 ** ((bucket - 0.5) / PER_OCTAVE)


def add_counts(into: dict[int, int], more: Iterable[tuple[int, int]]) -> None:
    """Adds counts by bucket."""
    for bucket, count in more:
        into[bucket] = into.get(bucket, 0) + count


def more_since(now: BucketCounts, before: BucketCounts) -> list[tuple[int, int]]:
    """Returns the gains of counts that only rise, for the buckets that gained."""
    known = dict(before)
    return [(bucket, count - known.get(bucket, 0)) for bucket, count in now if count > known.get(bucket, 0)]
