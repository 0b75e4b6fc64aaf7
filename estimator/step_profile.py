"""The step-time profile: seconds of a step from what it computes, fitted while the engine runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from core.errors import InvalidValueError
from core.messages import StepSample

MIN_SAMPLES = 32
"""Steps that must have been measured before any time is given; the first of them are slower than all later ones."""

OUTLIER_FACTOR = 3.0
"""A step that takes more than this many times its prediction counts as so many times its prediction."""

_FAMILIAR_FACTOR = 2.0
"""A step is familiar if no feature exceeds the largest one seen before by more than this factor."""

_SCALES = np.array([1.0, 1e3, 1e2, 1e5])
"""Usual size of (1, prefill tokens, decode sequences, context tokens); what is fitted is divided by it."""

_ANCHOR = 1e-3
"""Weight of the previous coefficients, in samples of usual size ..."""

_RELATIVE_ANCHOR = 1e-9
"""... and as a share of all samples: far above rounding errors, so that no sums are too one-sided to be solved for."""

_CHUNK = 64
"""Samples that are fitted at once; within them outliers are judged by the coefficients before them."""

_Array = npt.NDArray[np.float64]


class StepProfile:
    """``t = a + b * prefill_tokens + c * decode_seqs + d * context_tokens`` by recursive least squares.

    A sample's weight falls exponentially with the samples after it, so the profile follows a machine that changes.

    The recursion keeps the weighted sums ``X'X`` and ``X't`` and not their inverse. They are sums of a geometric
    series and stay bounded, whereas the inverse grows without limit in every direction that is no longer measured.
    Each solution is drawn towards the one before with a small weight: it decides nothing where there is data and
    all where there is none. So a feature that never varies has the coefficient 0, and one that has not been seen for a
    long time keeps the coefficient it had.

    No coefficient is negative: more work never takes less time, also outside of what has been measured.

    Outliers: a step beyond ``OUTLIER_FACTOR`` times its prediction counts as just that, once ``MIN_SAMPLES`` have
    been measured. One of them thus moves the profile little, while a machine that has become slower for good gets
    through, by steps. A step unlike all before (a feature more than twice as large as ever) counts in full, because
    its prediction is worth nothing.

    Args:
        window: After so many samples the weight of a sample has fallen to 1/e; at least 1.

    Raises:
        InvalidValueError: a window below 1.
    """

    def __init__(self, window: int = 2000) -> None:
        if window < 1:
            raise InvalidValueError("window", window, "an integer >= 1")
        self._keep = math.exp(-1 / window)
        self._gram = np.zeros((4, 4))
        self._moment = np.zeros(4)
        self._scaled = np.zeros(4)
        self._largest = np.zeros(4)
        self._shortest_s = math.inf
        self._num_samples = 0

    @property
    def num_samples(self) -> int:
        """Steps learnt from, ever."""
        return self._num_samples

    def coefficients(self) -> tuple[float, float, float, float]:
        """(a, b, c, d): seconds a step, a prefill token, a decoding sequence, a context token. 0 where unknown."""
        a, b, c, d = (self._scaled / _SCALES).tolist()
        return a, b, c, d

    def step_time_s(self, prefill_tokens: int, decode_seqs: int, context_tokens: int) -> float | None:
        """Seconds, at least those of the shortest step ever measured; None before ``MIN_SAMPLES`` samples."""
        if self._num_samples < MIN_SAMPLES:
            return None
        a, b, c, d = self.coefficients()
        return max(a + b * prefill_tokens + c * decode_seqs + d * context_tokens, self._shortest_s)

    def observe(self, samples: Sequence[StepSample]) -> None:
        """Learns from measured steps, oldest first. A duration that is not a positive number is passed over."""
        usable = [each for each in samples if math.isfinite(each.duration_s) and each.duration_s > 0]
        for start in range(0, len(usable), _CHUNK):
            self._learn(usable[start : start + _CHUNK])

    def _learn(self, samples: list[StepSample]) -> None:
        rows = [(1, each.prefill_tokens, each.decode_seqs, each.context_tokens) for each in samples]
        features = np.array(rows, dtype=np.float64) / _SCALES
        durations_s = np.array([each.duration_s for each in samples], dtype=np.float64)
        self._shortest_s = min(self._shortest_s, float(durations_s.min()))
        durations_s = self._clipped(features, durations_s)
        weights = self._keep ** np.arange(len(samples) - 1, -1, -1)
        faded = self._keep ** len(samples)
        weighted = features * weights[:, None]
        self._gram = faded * self._gram + weighted.T @ features
        self._moment = faded * self._moment + weighted.T @ durations_s
        self._largest = np.maximum(self._largest, features.max(axis=0))
        self._num_samples += len(samples)
        self._scaled = _solve(self._gram, self._moment, self._scaled)

    def _clipped(self, features: _Array, durations_s: _Array) -> _Array:
        """The durations, with outliers among the familiar steps cut down to ``OUTLIER_FACTOR`` x prediction."""
        if self._num_samples < MIN_SAMPLES:
            return durations_s
        predicted_s = np.maximum(features @ self._scaled, self._shortest_s)
        familiar = (features <= _FAMILIAR_FACTOR * self._largest).all(axis=1)
        return np.where(familiar, np.minimum(durations_s, OUTLIER_FACTOR * predicted_s), durations_s)


def _solve(gram: _Array, moment: _Array, previous: _Array) -> _Array:
    """Least squares, anchored at ``previous``, without negative coefficients.

    While one is negative, the most negative (by its share of the time) is set to 0 and the others are solved for
    again. This need not be the best of all non-negative solutions, but all four take part again at the next call.
    """
    anchor = _ANCHOR + _RELATIVE_ANCHOR * gram.diagonal()
    sizes = np.sqrt(gram.diagonal() + anchor)  # of the same size, features of any magnitude round alike
    gram = (gram + np.diag(anchor)) / np.outer(sizes, sizes)
    moment = (moment + anchor * previous) / sizes
    free = [0, 1, 2, 3]
    solution = np.zeros(4)
    while free:
        part = np.linalg.solve(gram[np.ix_(free, free)], moment[free])
        if part.min() >= 0:
            solution[free] = part
            break
        free.pop(int(part.argmin()))
    return solution / sizes
