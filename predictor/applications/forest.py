"""A forest over what is known of a request's client, application and words: lengths of earlier outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farsight.core.errors import InvalidValueError
from farsight.predictor.applications.grams import NO_GRAM
from farsight.predictor.applications.reading import (
    FORM_AT,
    GRAMS_AT,
    KEYS,
    NO_KEY,
    NUM_FEATURES,
    NUM_LENGTHS,
    keys_of,
)
from farsight.predictor.features import NUM_IMAGE_FEATURES, Floats
from farsight.predictor.forest import Forest, LengthDistributions
from farsight.predictor.trainer import ForestOptions, grow

RIDGE = 0.25
"""Ridge penalty, beside words whose squares sum up to 1 in each request."""

DENSE_SHARE = 1.0
"""What the squares of all other features of a request sum up to, in the mean."""

NUM_FOLDS = 5

_ROUNDS = 60


@dataclass(frozen=True, slots=True)
class LinearScore:
    """Weights of a ridge regression.

    Attributes:
        grams: (grams,), numbers of the known words, rising; of the type of ``ids``, so that no search converts them.
        gram_weights: (grams,).
        slopes: (dense + 1,), of the other features; the last one is the constant.
    """

    grams: Floats
    gram_weights: Floats
    slopes: NDArray[np.float64]

    def scores(self, ids: Floats, dense: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
        """Scores requests, shape (rows,): logarithms of tokens.

        Args:
            ids: (rows, NUM_GRAMS), from ``gram_ids``.
            dense: (rows, dense).
        """
        scores: NDArray[np.float64] = dense @ self.slopes[:-1] + self.slopes[-1]
        if len(self.grams):
            place = np.minimum(np.searchsorted(self.grams, ids), len(self.grams) - 1)
            weights = np.where(self.grams[place] == ids, self.gram_weights[place], 0.0)
            scores += weights.sum(axis=1) * _scale(ids)
        return scores


def _scale(ids: Floats) -> NDArray[np.float64]:
    """Returns the value of each word of a request, shape (rows,): the squares of a request's words sum up to 1."""
    scale: NDArray[np.float64] = 1.0 / np.sqrt(np.maximum((ids != NO_GRAM).sum(axis=1), 1))
    return scale


def fit_score(
    ids: Floats, dense: NDArray[np.floating[Any]], output_lens: NDArray[np.integer], folds: NDArray[np.integer]
) -> tuple[LinearScore, NDArray[np.float64]]:
    """Fits the score, and scores its own examples by weights that were fitted to the other folds.

    Args:
        ids: (rows, NUM_GRAMS).
        dense: (rows, dense).
        output_lens: (rows,), in tokens.
        folds: (rows,), from 0 to ``NUM_FOLDS`` - 1.

    Returns:
        The score, and (rows,). O(folds · rounds · words).
    """
    from scipy.sparse import csr_array, hstack

    known = ids != NO_GRAM
    grams, places = np.unique(ids[known], return_inverse=True)
    begin = np.concatenate([[0], np.cumsum(known.sum(axis=1))])
    values = np.repeat(_scale(ids), known.sum(axis=1))
    words = csr_array((values, places, begin), shape=(len(ids), len(grams)))
    centre, spread = dense.mean(axis=0, dtype=np.float64), dense.std(axis=0, dtype=np.float64)
    # A feature that hardly differs among the examples says nothing, and must not decide where it differs for once.
    unit = np.where(spread > 1e-3, np.sqrt(DENSE_SHARE / dense.shape[1]) / np.maximum(spread, 1e-3), 0.0)
    design = hstack([words, csr_array((dense - centre) * unit)], format="csr")
    target = np.log(np.maximum(output_lens, 1))
    scores = np.empty(len(target))
    for fold in range(NUM_FOLDS):
        out = folds == fold
        weights, mean = _ridge(design[~out], target[~out])
        scores[out] = design[out] @ weights + mean
    weights, mean = _ridge(design, target)
    slopes = weights[len(grams) :] * unit
    constant = mean - centre @ slopes
    return LinearScore(grams, weights[: len(grams)].astype(np.float32), np.append(slopes, constant)), scores


def _ridge(design: Any, target: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Returns the weights, and the mean of the target, which is not shrunk."""
    from scipy.sparse.linalg import lsqr

    mean = float(target.mean())
    return lsqr(design, target - mean, damp=RIDGE**0.5, iter_lim=_ROUNDS)[0], mean


CHAINS = (("tenant", "opening", "instruction"), ("tenant", "client", "call"))
"""Keys from the general to the special one: what is known of one is shrunk towards what is known of the one before."""

SHRINK = 2.0
"""Examples that the mean of the level above counts for, beside a key's own."""

HALF_LIFE = 200.0
"""Examples of a key after which an earlier one counts half."""

NUM_STATISTICS = 4
"""Statistics of a key: number of examples, mean logarithm of the output length, the same over the input length, and the
mean square of the former."""

NUM_DERIVED = NUM_LENGTHS + 3 * len(CHAINS)
"""Lengths and statistics of the keys, which stand before what is read of images, form and call."""

NUM_DENSE = NUM_DERIVED + GRAMS_AT - FORM_AT
"""Features of the score beside the words; the forest has the score as one more."""

_LOGGED = [*range(NUM_LENGTHS), *range(NUM_DERIVED, NUM_DERIVED + NUM_IMAGE_FEATURES + 1)]
"""Columns of lengths and numbers, of which the score reads the logarithm: the last one is the input's characters."""


@dataclass(frozen=True, slots=True)
class KeyStatistics:
    """Sums over the examples of each key.

    Attributes:
        keys: (keys,), rising.
        sums: (keys + 1, NUM_STATISTICS), the last row over all examples; a key's later examples count more.
    """

    keys: NDArray[np.int64]
    sums: NDArray[np.float64]

    def derived(self, raw: Floats) -> Floats:
        """Derives what the score and the forest read.

        Args:
            raw: (rows, NUM_FEATURES), from ``raw_features``.

        Returns:
            (rows, NUM_DENSE): the three lengths; by each chain of keys the output length, the output length by its mean
            ratio to the input, and the spread of outputs; images, form and call unchanged. O(rows log keys).
        """
        parts = [raw[:, :NUM_LENGTHS]]
        total = self.sums[-1:] / max(self.sums[-1, 0], 1.0)
        for chain in CHAINS:
            known = np.repeat(total[:, 1:], len(raw), axis=0)
            for key in chain:
                own = self._sums_of(keys_of(raw, key))
                known = (own[:, 1:] + SHRINK * known) / (own[:, :1] + SHRINK)
            by_ratio = known[:, 1] + np.log1p(raw[:, 0])
            spread = np.sqrt(np.maximum(known[:, 2] - known[:, 0] ** 2, 0.0))
            parts.append(np.stack([known[:, 0], by_ratio, spread], axis=1).astype(np.float32))
        return np.concatenate([*parts, raw[:, FORM_AT:GRAMS_AT]], axis=1)

    def _sums_of(self, keys: NDArray[np.int64]) -> NDArray[np.float64]:
        """Looks up sums, shape (rows, NUM_STATISTICS); zeros for a key without examples."""
        if not len(self.keys):
            return np.zeros((len(keys), NUM_STATISTICS))
        place = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where((self.keys[place] == keys)[:, None], self.sums[place], 0.0)


def statistics_of(raw: Floats, output_lens: NDArray[np.integer]) -> KeyStatistics:
    """Sums up examples, oldest first: raw features (rows, NUM_FEATURES) and output lengths (rows,) in tokens."""
    log_lens = np.log1p(np.asarray(output_lens, np.float64))
    values = np.stack([np.ones(len(raw)), log_lens, log_lens - np.log1p(raw[:, 0]), log_lens**2], axis=1)
    keys, places = np.unique(np.concatenate([keys_of(raw, key) for key in KEYS]), return_inverse=True)
    sums = np.zeros((len(keys) + 1, NUM_STATISTICS))
    np.add.at(sums, places, np.concatenate([values] * len(KEYS)) * _recency(places)[:, None])
    sums[-1] = values.sum(axis=0)
    return KeyStatistics(keys, sums)


def _recency(places: NDArray[np.integer]) -> NDArray[np.float64]:
    """Returns the weight of each example among those of its key, oldest first; shape as ``places``."""
    order = np.argsort(places, kind="stable")
    ends = np.cumsum(np.bincount(places))
    newer = np.empty(len(places))
    newer[order] = ends[places[order]] - 1 - np.arange(len(places))
    weights: NDArray[np.float64] = 0.5 ** (newer / HALF_LIFE)
    return weights


@dataclass(frozen=True, slots=True)
class ApplicationForest(Forest):
    """``Forest`` over derived features and the score, whose rows are raw ones.

    Attributes:
        keys: As in ``KeyStatistics``; so is ``key_sums``.
        grams: As in ``LinearScore``; so are ``gram_weights`` and ``slopes``.
        score_unit: (1,), what a unit of the score counts for beside the forest's own rank: both differ alike.
    """

    keys: NDArray[np.int64]
    key_sums: NDArray[np.float64]
    grams: Floats
    gram_weights: Floats
    slopes: NDArray[np.float64]
    score_unit: NDArray[np.float64]

    def check(self) -> None:
        """
        Raises:
            ValueError: As ``Forest.check``.
        """
        Forest.check(self)
        weights = (self.key_sums, self.gram_weights, self.slopes, self.score_unit)
        fits = (
            self.num_features == NUM_DENSE + 1
            and self.keys.ndim == self.grams.ndim == 1
            and self.key_sums.shape == (len(self.keys) + 1, NUM_STATISTICS)
            and self.gram_weights.shape == self.grams.shape
            and (self.slopes.shape, self.score_unit.shape) == ((NUM_DENSE + 1,), (1,))
            and bool((np.diff(self.keys) > 0).all() and (np.diff(self.grams) > 0).all())
            and all(bool(np.isfinite(each).all()) for each in weights)
        )
        if not fits:
            raise ValueError("a forest by application whose arrays fit together")

    def distribution(self, features: Floats, levels: Sequence[float]) -> LengthDistributions:
        """Returns what ``Forest.distribution`` does, for raw features (rows, NUM_FEATURES)."""
        derived = KeyStatistics(self.keys, self.key_sums).derived(features)
        score = LinearScore(self.grams, self.gram_weights, self.slopes)
        scores = score.scores(features[:, GRAMS_AT:], _dense(derived))
        found = Forest.distribution(self, _with_score(derived, scores), levels)
        # The two orders err on different requests: their sum orders better than either of them.
        return replace(found, rank=found.rank + scores * self.score_unit[0])


def _dense(derived: Floats) -> Floats:
    """Returns the score's features of the same shape: lengths by their logarithms."""
    dense = derived.copy()
    dense[:, _LOGGED] = np.log1p(dense[:, _LOGGED])
    return dense


def _with_score(derived: Floats, scores: NDArray[np.float64]) -> Floats:
    return np.concatenate([derived, scores[:, None].astype(np.float32)], axis=1)


UNKNOWN = 0.2
"""Share of the examples that are also shown as requests of an unknown application."""


def grow_by_application(raw: Floats, output_lens: NDArray[np.integer], options: ForestOptions) -> ApplicationForest:
    """Grows a forest over statistics of keys and a score.

    An example's own length is part of its application's statistics. A forest grown on these would trust them too much,
    so each example gets the statistics, and the score, of the other folds. Some examples are used a second time, as
    requests of an application without examples, so that an unknown application gets the law of all, not of one that
    resembles it.

    Args:
        raw: (rows, NUM_FEATURES), from ``raw_features``, oldest first.
        output_lens: (rows,), in tokens.
        options: How the forest is grown; its seed also draws the folds.

    Raises:
        InvalidValueError: fewer rows than folds, or rows of another width.
    """
    if raw.ndim != 2 or raw.shape[1] != NUM_FEATURES or len(raw) < NUM_FOLDS:
        raise InvalidValueError("features", raw.shape, f"({NUM_FOLDS} rows or more, {NUM_FEATURES})")
    folds = np.arange(len(raw)) % NUM_FOLDS
    rng = np.random.default_rng(options.seed)
    rng.shuffle(folds)
    derived = np.empty((len(raw), NUM_DENSE), np.float32)
    for fold in range(NUM_FOLDS):
        out = folds == fold
        derived[out] = statistics_of(raw[~out], output_lens[~out]).derived(raw[out])
    score, scores = fit_score(raw[:, GRAMS_AT:], _dense(derived), output_lens, folds)
    known = statistics_of(raw, output_lens)
    unknown = rng.permutation(len(raw))[: max(round(UNKNOWN * len(raw)), 1)]
    nameless = raw[unknown]
    nameless[:, NUM_LENGTHS:FORM_AT] = NO_KEY
    of_unknown = known.derived(nameless)
    rows = np.concatenate(
        [
            _with_score(derived, scores),
            _with_score(of_unknown, score.scores(np.full_like(nameless[:, GRAMS_AT:], NO_GRAM), _dense(of_unknown))),
        ]
    )
    forest = grow(rows, np.concatenate([output_lens, output_lens[unknown]]), options)
    ranks = forest.leaf_rank[forest.apply(rows[: len(raw)])].mean(axis=1)
    return ApplicationForest(
        **{each.name: getattr(forest, each.name) for each in fields(Forest)},
        keys=known.keys,
        key_sums=known.sums,
        grams=score.grams,
        gram_weights=score.gram_weights,
        slopes=score.slopes,
        score_unit=np.array([float(ranks.std()) / max(float(scores.std()), 1e-6)]),
    )
