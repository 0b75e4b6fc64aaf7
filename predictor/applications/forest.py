"""A forest over what is known of a request's application: lengths of its earlier outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from farsight.core.errors import InvalidValueError
from farsight.predictor.applications.reading import KEYS, NO_KEY, NUM_TEXT_FEATURES, WIDTHS, keys_of
from farsight.predictor.features import Floats
from farsight.predictor.forest import Forest
from farsight.predictor.quantiles import LengthDistributions
from farsight.predictor.trainer import ForestOptions, grow

SHRINK = 2.0
"""Examples that the mean of the level above counts for, beside a key's own: openings stand above instructions."""

NUM_STATISTICS = 4
"""Statistics of a key: number of examples, mean logarithm of the output length, the same over the input length, and the
mean square of the former."""

NUM_DERIVED = 6
"""Numbers of the forest's input that say neither what images there are nor what form the input has."""


@dataclass(frozen=True, slots=True)
class KeyStatistics:
    """Sums over the examples of each key.

    Attributes:
        keys: (keys,), rising.
        sums: (keys + 1, NUM_STATISTICS), the last row over all examples.
    """

    keys: NDArray[np.int64]
    sums: NDArray[np.float64]

    def derived(self, raw: Floats) -> Floats:
        """Derives the forest's input.

        Args:
            raw: (rows, one of ``WIDTHS``), from ``raw_features``.

        Returns:
            (rows, NUM_DERIVED and the columns behind the keys): the three lengths, the output length by the
            application's mean, the output length by its mean ratio to the input, the spread of its outputs, and the
            columns of images and form unchanged. O(rows log keys).
        """
        total = self.sums[-1:] / max(self.sums[-1, 0], 1.0)
        known = np.repeat(total[:, 1:], len(raw), axis=0)
        for columns in reversed(KEYS):  # the opening first: it is the level above the instruction
            own = self._sums_of(keys_of(raw, columns))
            known = (own[:, 1:] + SHRINK * known) / (own[:, :1] + SHRINK)
        by_ratio = known[:, 1] + np.log1p(raw[:, 0])
        spread = np.sqrt(np.maximum(known[:, 2] - known[:, 0] ** 2, 0.0))
        statistics = np.stack([known[:, 0], by_ratio, spread], axis=1)
        derived = np.concatenate([raw[:, :3], statistics, raw[:, NUM_TEXT_FEATURES:]], axis=1)
        return derived.astype(np.float32)

    def _sums_of(self, keys: NDArray[np.int64]) -> NDArray[np.float64]:
        """Looks up sums, shape (rows, NUM_STATISTICS); zeros for a key without examples."""
        if not len(self.keys):
            return np.zeros((len(keys), NUM_STATISTICS))
        place = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where((self.keys[place] == keys)[:, None], self.sums[place], 0.0)


def statistics_of(raw: Floats, output_lens: NDArray[np.integer]) -> KeyStatistics:
    """Sums up examples: raw features (rows, NUM_FEATURES) and output lengths (rows,) in tokens."""
    log_lens = np.log1p(np.asarray(output_lens, np.float64))
    values = np.stack([np.ones(len(raw)), log_lens, log_lens - np.log1p(raw[:, 0]), log_lens**2], axis=1)
    keys, places = np.unique(np.concatenate([keys_of(raw, columns) for columns in KEYS]), return_inverse=True)
    sums = np.zeros((len(keys) + 1, NUM_STATISTICS))
    np.add.at(sums, places, np.concatenate([values] * len(KEYS)))
    sums[-1] = values.sum(axis=0)
    return KeyStatistics(keys, sums)


@dataclass(frozen=True, slots=True)
class ApplicationForest(Forest):
    """``Forest`` over derived features, whose rows are raw ones.

    Attributes:
        keys: As in ``KeyStatistics``; so is ``key_sums``.
    """

    keys: NDArray[np.int64]
    key_sums: NDArray[np.float64]

    def check(self) -> None:
        """
        Raises:
            ValueError: As ``Forest.check``.
        """
        Forest.check(self)
        fits = (
            self.num_features in [NUM_DERIVED + width - NUM_TEXT_FEATURES for width in WIDTHS]
            and self.keys.ndim == 1
            and self.key_sums.shape == (len(self.keys) + 1, NUM_STATISTICS)
            and bool((np.diff(self.keys) > 0).all() and np.isfinite(self.key_sums).all())
        )
        if not fits:
            raise ValueError("a forest by application whose arrays fit together")

    def distribution(self, features: Floats, levels: Sequence[float]) -> LengthDistributions:
        """Returns what ``Forest.distribution`` does, for raw features (rows, one of ``WIDTHS``)."""
        derived = KeyStatistics(self.keys, self.key_sums).derived(features)
        return Forest.distribution(self, derived, levels)


UNKNOWN = 0.2
"""Share of the examples that are also shown as requests of an unknown application."""

_NUM_FOLDS = 5


def grow_by_application(raw: Floats, output_lens: NDArray[np.integer], options: ForestOptions) -> ApplicationForest:
    """Grows a forest over statistics of applications.

    An example's own length is part of its application's statistics. A forest grown on these would trust them too much,
    so each example gets the statistics of the other folds. Some examples are used a second time, as requests of an
    application without examples, so that an unknown application gets the law of all, not of one that resembles it.

    Args:
        raw: (rows, one of ``WIDTHS``), from ``raw_features``.
        output_lens: (rows,), in tokens.
        options: How the forest is grown; its seed also draws the folds.

    Raises:
        InvalidValueError: fewer rows than folds, or rows of another width.
    """
    if raw.ndim != 2 or raw.shape[1] not in WIDTHS or len(raw) < _NUM_FOLDS:
        raise InvalidValueError("features", raw.shape, f"({_NUM_FOLDS} rows or more, {WIDTHS[-1]})")
    folds = np.arange(len(raw)) % _NUM_FOLDS
    rng = np.random.default_rng(options.seed)
    rng.shuffle(folds)
    derived = np.empty((len(raw), NUM_DERIVED + raw.shape[1] - NUM_TEXT_FEATURES), np.float32)
    for fold in range(_NUM_FOLDS):
        out = folds == fold
        derived[out] = statistics_of(raw[~out], output_lens[~out]).derived(raw[out])
    known = statistics_of(raw, output_lens)
    unknown = rng.permutation(len(raw))[: max(round(UNKNOWN * len(raw)), 1)]
    nameless = raw[unknown]
    for columns in KEYS:
        nameless[:, columns] = NO_KEY
    rows = np.concatenate([derived, known.derived(nameless)])
    forest = grow(rows, np.concatenate([output_lens, output_lens[unknown]]), options)
    return ApplicationForest(
        **{each.name: getattr(forest, each.name) for each in fields(Forest)}, keys=known.keys, key_sums=known.sums
    )
