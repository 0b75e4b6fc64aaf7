"""The latest output lengths as a distribution, and draws from it (Past-Future, section 3.2, equation 1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from farsight.core.errors import InvalidValueError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

CDF_TOLERANCE = 1e-9
"""Far above the rounding of a product of 1000 factors, far below the mass of one entry."""


class LengthHistory:
    """The latest output lengths and their law P(l).

    The natural length of an output that was cut (by its limit, or an abort) is only known to be at least its length.
    Such censored entries never count as ends: P(l) is the Kaplan-Meier estimate, which without them is the plain share
    of each length (equation 1). The mass that finished outputs do not account for lies above all observed lengths.

    The sorted law is rebuilt on the first question after an ``add``, O(w log w).

    Args:
        window: Number of kept entries, w in the paper.
        initial: Finished lengths to start from, oldest first. The paper starts from the longest possible output; one
            such entry is enough and is outweighed soon, a window full of them holds admission back for 1000 requests.

    Raises:
        InvalidValueError: The window is below 1, or a length is negative.
    """

    def __init__(self, window: int = 1000, initial: Sequence[int] = ()) -> None:
        if window < 1:
            raise InvalidValueError("window", window, "an integer >= 1")
        self.version = 0
        """Rises with each ``add``."""
        self._window = window
        # Twice the length, plus one for a cut output, so that ends sort before cuts of the same length.
        self._codes: list[int] = []
        self._is_sorted = False
        for length in initial:
            self.add(length)

    def __len__(self) -> int:
        return len(self._codes)

    def add(self, length: int, *, censored: bool = False) -> None:
        """Adds an output of this many tokens; ``censored``: it was cut off. O(1)."""
        if length < 0:
            raise InvalidValueError("length", length, "an integer >= 0")
        code = 2 * length + censored
        if len(self._codes) < self._window:
            self._codes.append(code)
        else:
            self._codes[self.version % self._window] = code
        self.version += 1
        self._is_sorted = False

    def quantiles(self, levels: FloatArray, going_on: Sequence[int] = ()) -> IntArray:
        """Returns the least lengths l with P(up to l) >= level; O(log w) each.

        Mass above all observed lengths counts as the longest entry here (Efron's convention).

        Args:
            going_on: Tokens so far of unfinished outputs: each counts as a cut entry. Without these the law is that of
                the outputs that end first, which an order for short jobs makes too short. O(w log w) with any.

        Raises:
            InvalidValueError: The history is empty.
        """
        if not self._codes:
            raise InvalidValueError("history", 0, "at least one length")
        codes = self._codes
        if len(going_on):
            codes = codes + [2 * length + 1 for length in going_on]
            lengths, cdf = _kaplan_meier(codes)
        else:
            self._sort()
            lengths, cdf = self._lengths, self._cdf
        index = np.searchsorted(cdf, np.asarray(levels) - CDF_TOLERANCE, side="left")
        return np.append(lengths, max(codes) // 2)[index]

    def sample(self, rng: np.random.Generator, n: int) -> IntArray:
        """Returns n independent lengths of P(l), as ``quantiles`` sees it; shape (n,)."""
        return self.quantiles(rng.random(n))

    def sample_above(self, rng: np.random.Generator, generated: IntArray, limit: IntArray, num_lists: int) -> IntArray:
        """Draws whole output lengths of n running jobs from P(l | l > generated), equation 1; O(num_lists n log w).

        Args:
            rng: Always draws num_lists times n uniform numbers.
            generated: l_t of each job, shape (n,).
            limit: max_new_tokens of each, shape (n,). No drawn length is above the limit; the limit is drawn where no
                entry is longer than ``generated`` (the paper is silent).
            num_lists: Independent lists of draws.

        Returns:
            Shape (num_lists, n).
        """
        self._sort()
        first = np.searchsorted(self._lengths, generated, side="right")
        below = self._cdf_from_zero[first]
        target = below + rng.random((num_lists, len(generated))) * (1.0 - below)
        lengths = self._lengths_to_infinity[np.searchsorted(self._cdf, target, side="right")]
        bounded: IntArray = np.minimum(lengths, limit)
        return bounded

    def _sort(self) -> None:
        if self._is_sorted:
            return
        lengths, cdf = _kaplan_meier(self._codes)
        self._lengths_to_infinity = np.append(lengths, np.iinfo(np.int64).max)
        self._cdf_from_zero = np.append(0.0, cdf)
        self._lengths, self._cdf = self._lengths_to_infinity[:-1], self._cdf_from_zero[1:]
        self._is_sorted = True


def _kaplan_meier(codes: Sequence[int]) -> tuple[IntArray, FloatArray]:
    """Returns the lengths that ended, rising, and P(up to each): every end takes its share of the entries at risk, and
    ends come before cuts.

    Args:
        codes: Twice the length, plus one for a cut output.
    """
    ordered = np.sort(np.array(codes, np.int64))
    is_end = ordered % 2 == 0
    at_risk = np.arange(len(ordered), 0, -1)
    survival = np.cumprod(np.where(is_end, 1.0 - 1.0 / at_risk, 1.0))
    return ordered[is_end] // 2, 1.0 - survival[is_end]
