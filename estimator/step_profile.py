"""The step-time profile: seconds of a step from what it computes, fitted as the engine runs or to a grid of steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from farsight.core.costs import StepCost
from farsight.core.errors import InvalidValueError
from farsight.core.messages.step_times import StepSample

MIN_SAMPLES = 32
"""Measured steps before the profile gives any time; the first of them are slower than all later ones."""

OUTLIER_FACTOR = 3.0
"""A step counts as at most this many times its prediction, and as at least its prediction over this number."""

_FAMILIAR_FACTOR = 2.0
"""A step is familiar if no feature exceeds the largest one seen before by more than this factor."""

_SCALES = np.array([1.0, 1e3, 1e2, 1e5, 1e6])
"""Usual sizes of (1, prefill tokens, decode sequences, context tokens, prefill pairs): features are divided by them."""

_ANCHOR = 1e-6
"""Weight of the previous coefficients, in samples of usual size and duration."""

_RELATIVE_ANCHOR = 1e-9
"""The same weight as a share of all samples: far above rounding errors, so that the system can always be solved."""

_CHUNK = 64
"""Samples that are fitted at once; within them outliers are judged by the coefficients before them."""

_NUM_TERMS = len(_SCALES)
_DECODE_SEQS = 2  # index of that feature

_Array = npt.NDArray[np.float64]


class StepProfile:
    """``t = a + b * prefill_tokens + c * decode_seqs + d * context_tokens + e * prefill_pairs``, by recursive least
    squares of the *relative* error.

    The error is relative because long steps are noisier: least squares of seconds would follow the few steps that other
    work has interrupted, and be far off for the many short ones. An interrupted step also weighs less, since it took
    longer, so the fit is nearer to the usual step than to the mean.

    A sample's weight falls exponentially with the samples after it, so the profile follows a machine that changes.

    The recursion keeps the weighted sums ``X'X`` and ``X't`` and not their inverse. They are sums of a geometric
    series and stay bounded, whereas the inverse grows without limit in every direction that is no longer measured.
    Each solution is drawn towards the one before with a small weight, which decides only where there is no data. So a
    feature that never varies has the coefficient 0, and a feature that has not been seen for a long time keeps its
    coefficient.

    No coefficient is negative: more work never takes less time, also outside the measured range.

    Outliers: once ``MIN_SAMPLES`` steps have been measured, a duration is clipped to ``OUTLIER_FACTOR`` times its
    prediction, or to its prediction over that factor. So one outlier moves the profile little, while the profile
    follows a machine that has become slower or faster for good. A step unlike all before (a feature more than twice as
    large as ever) counts in full, because its prediction is worth nothing.

    Args:
        window: After so many samples the weight of a sample has fallen to 1/e; at least 1.

    Raises:
        InvalidValueError: a window below 1.
    """

    def __init__(self, window: int = 2000) -> None:
        if window < 1:
            raise InvalidValueError("window", window, "an integer >= 1")
        self._keep = math.exp(-1 / window)
        self._gram = np.zeros((_NUM_TERMS, _NUM_TERMS))
        self._moment = np.zeros(_NUM_TERMS)
        self._scaled = np.zeros(_NUM_TERMS)
        self._largest = np.zeros(_NUM_TERMS)
        self._num_weighed = 0.0
        self._shortest_s = math.inf
        self._num_samples = 0

    @property
    def num_samples(self) -> int:
        """Number of steps learned from so far."""
        return self._num_samples

    def coefficients(self) -> tuple[float, float, float, float, float]:
        """Returns (a, b, c, d, e): seconds of a step, and of each unit of its work as in ``StepCost``. 0 if unknown."""
        a, b, c, d, e = (self._scaled / _SCALES).tolist()
        return a, b, c, d, e

    def cost(self) -> StepCost | None:
        """Returns the coefficients as policies take them.

        None before ``MIN_SAMPLES`` samples, and before decoding has a price: a busy replica may begin with prompts.
        """
        cost = StepCost(*self.coefficients())
        has_decoded = self._largest[_DECODE_SEQS] > 0 and cost.decode_s(1) > 0
        return cost if has_decoded and self._num_samples >= MIN_SAMPLES else None

    def step_time_s(
        self, prefill_tokens: int, decode_seqs: int, context_tokens: int, prefill_pairs: int = 0
    ) -> float | None:
        """Returns seconds, no fewer than the shortest measured step took; None while ``cost`` is None."""
        cost = self.cost()
        if cost is None:
            return None
        return max(cost.step_s(prefill_tokens, decode_seqs, context_tokens, prefill_pairs), self._shortest_s)

    def observe(self, samples: Sequence[StepSample]) -> None:
        """Learns from measured steps, oldest first. Skips a duration that is not a positive number."""
        usable = [each for each in samples if math.isfinite(each.duration_s) and each.duration_s > 0]
        for start in range(0, len(usable), _CHUNK):
            self._learn(usable[start : start + _CHUNK])

    def _learn(self, samples: list[StepSample]) -> None:
        features = np.array([_work(each) for each in samples], dtype=np.float64) / _SCALES
        durations_s = np.array([each.duration_s for each in samples], dtype=np.float64)
        self._shortest_s = min(self._shortest_s, float(durations_s.min()))
        durations_s = self._clipped(features, durations_s)
        weights = self._keep ** np.arange(len(samples) - 1, -1, -1)
        faded = self._keep ** len(samples)
        weighted = features * (weights / durations_s**2)[:, None]
        self._gram = faded * self._gram + weighted.T @ features
        self._moment = faded * self._moment + weighted.T @ durations_s
        self._num_weighed = faded * self._num_weighed + float(weights.sum())
        self._largest = np.maximum(self._largest, features.max(axis=0))
        self._num_samples += len(samples)
        # The first feature is always 1: its entry over the number of samples is the mean weight of a sample.
        self._scaled = _solve(self._gram, self._moment, self._scaled, _ANCHOR * self._gram[0, 0] / self._num_weighed)

    def _clipped(self, features: _Array, durations_s: _Array) -> _Array:
        """Clips the durations of familiar steps to a factor of ``OUTLIER_FACTOR`` from their predictions."""
        if self._num_samples < MIN_SAMPLES:
            return durations_s
        predicted_s = np.maximum(features @ self._scaled, self._shortest_s)
        familiar = (features <= _FAMILIAR_FACTOR * self._largest).all(axis=1)
        clipped_s = np.clip(durations_s, predicted_s / OUTLIER_FACTOR, predicted_s * OUTLIER_FACTOR)
        return np.where(familiar, clipped_s, durations_s)


def _work(sample: StepSample) -> tuple[int, int, int, int, int]:
    return 1, sample.prefill_tokens, sample.decode_seqs, sample.context_tokens, sample.prefill_pairs


def _solve(gram: _Array, moment: _Array, previous: _Array, anchor_weight: float) -> _Array:
    """Solves least squares, anchored at ``previous``, without negative coefficients.

    While a coefficient is negative, the most negative one (by its share of the time) is set to 0 and the others are
    solved for again. The result need not be the best non-negative one, but each call begins with all coefficients.
    """
    anchor = anchor_weight + _RELATIVE_ANCHOR * gram.diagonal()
    sizes = np.sqrt(gram.diagonal() + anchor)  # scaling gives features of any magnitude the same rounding errors
    gram = (gram + np.diag(anchor)) / np.outer(sizes, sizes)
    moment = (moment + anchor * previous) / sizes
    free = list(range(_NUM_TERMS))
    solution = np.zeros(_NUM_TERMS)
    while free:
        part = np.linalg.solve(gram[np.ix_(free, free)], moment[free])
        if part.min() >= 0:
            solution[free] = part
            break
        free.pop(int(part.argmin()))
    return solution / sizes


SMALLEST_CHUNK = 8
"""Tokens of the shortest prompt and of the shortest context."""

FACTOR = 4
"""Factor between neighbouring lengths."""

BATCH_FACTOR = 2
"""Factor between neighbouring batch sizes. It is smaller because the price of decoding varies most in small batches."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """The work of one step.

    Attributes:
        chunks: (start, tokens) of each part of a prompt; at least 2 tokens.
        contexts: Tokens before the one that each decoding sequence computes.
    """

    chunks: tuple[tuple[int, int], ...] = ()
    contexts: tuple[int, ...] = ()

    @property
    def ends(self) -> list[int]:
        """Tokens of each of its sequences once the step is done."""
        return [start + num for start, num in self.chunks] + [context + 1 for context in self.contexts]


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits of what a worker can run at once.

    Attributes:
        max_num_seqs: Sequences in a step.
        max_batch_tokens: Tokens computed in a step.
        max_model_len: Tokens of a sequence; at least ``SMALLEST_CHUNK``.
        block_size: Tokens of a KV block.
        num_blocks: Blocks of the pool.
    """

    max_num_seqs: int
    max_batch_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int

    def allow(self, shape: StepShape) -> bool:
        """Returns whether the step fits."""
        blocks = sum(-(-end // self.block_size) for end in shape.ends)
        tokens = sum(num for _, num in shape.chunks) + len(shape.contexts)
        fits = blocks <= self.num_blocks and tokens <= self.max_batch_tokens
        return fits and len(shape.ends) <= self.max_num_seqs and max(shape.ends) <= self.max_model_len


def step_grid(limits: StepLimits) -> list[StepShape]:
    """Lists some 60 steps to measure: prompts by length, context and number; decodes by batch and context; both."""
    return [shape for shape in dict.fromkeys(_shapes(limits)) if limits.allow(shape)]


def _shapes(limits: StepLimits) -> Iterator[StepShape]:
    lens = _scale(SMALLEST_CHUNK, limits.max_model_len - 1, FACTOR)
    batches = _scale(1, limits.max_num_seqs, BATCH_FACTOR)
    chunk_lens = _scale(SMALLEST_CHUNK, min(limits.max_model_len, limits.max_batch_tokens), FACTOR)
    for num_tokens in chunk_lens:
        room = limits.max_model_len - num_tokens
        for start in (0, room // 2, room):
            yield StepShape(chunks=((start, num_tokens),))
        yield StepShape(chunks=((0, num_tokens),) * 4)
    for num_seqs in batches:
        for context in lens:
            yield StepShape(contexts=(context,) * num_seqs)
    middle = lens[len(lens) // 2]
    for num_tokens in chunk_lens:
        for num_seqs in batches[1::2]:
            yield StepShape(((0, num_tokens),), (middle,) * num_seqs)


def _scale(low: int, high: int, factor: int) -> list[int]:
    """Lists ``low`` times the powers of ``factor`` below ``high``, then ``high``."""
    found = []
    while low < high:
        found.append(low)
        low *= factor
    return [*found, high]
