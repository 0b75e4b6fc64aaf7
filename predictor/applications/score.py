"""A linear score of the logarithm of the output length: hashed words beside the features of a forest.

With a hundred examples a linear model tells more of words than trees do; trees then turn the score into a law.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farsight.predictor.applications.grams import NO_GRAM
from farsight.predictor.features import Floats

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
