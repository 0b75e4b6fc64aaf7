"""Distributions of many requests at once, and quantiles of pooled outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class LengthDistributions:
    """Distributions of the output lengths of some requests, in tokens.

    Attributes:
        mean: (rows,).
        quantiles: (rows, levels), not falling along a row.
        rank: (rows,), orders the requests, shortest first; comparable within one model only.
        num_samples: (rows,), training outputs behind each row.
    """

    mean: NDArray[np.float64]
    quantiles: NDArray[np.float64]
    rank: NDArray[np.float64]
    num_samples: NDArray[np.int64]


def linear_quantiles(
    pool: NDArray[np.int32], begin: NDArray[np.int64], num_samples: NDArray[np.int64], levels: Sequence[float]
) -> NDArray[np.float64]:
    """Computes quantiles, linear between neighbours, of runs of ``pool``.

    Args:
        pool: Runs of outputs, each run sorted.
        begin: (rows,), where a row's run begins.
        num_samples: (rows,), the run's length, at least 1.
        levels: In [0, 1].

    Returns:
        (rows, levels). O(rows · levels).
    """
    last = (num_samples - 1)[:, None]
    place = last * np.asarray(levels)[None, :]
    low = place.astype(np.int64)
    below = pool[begin[:, None] + low].astype(np.float64)
    above = pool[begin[:, None] + np.minimum(low + 1, last)]
    found: NDArray[np.float64] = below + (place - low) * (above - below)
    return found
