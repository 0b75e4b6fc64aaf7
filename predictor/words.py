"""Scores of a text from its words alone, without an encoder: hashed words and word pairs, weighted by a ridge.

A request has two scores: the place of its output among all (0 shortest, 1 longest), and the logarithm of output length
over input length. A forest turns the scores into a distribution.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farsight.core.forecast import ForecastQuestion
from farsight.predictor.features import NUM_IMAGE_FEATURES, Floats, with_images

NUM_BUCKETS = 2**15
"""Buckets for the n-grams of one text; instruction and user input have buckets of their own."""

MAX_WORDS = 512
"""Most words read of a text, from its beginning: bounds the time of a forecast."""

NUM_FEATURES = 4 + NUM_IMAGE_FEATURES
"""Number of features of a forest over these scores; artefacts that count no images have the first 4 alone."""

_NUM_FOLDS = 4
_RIDGE = 10.0
_USER_WEIGHT = 0.5
"""Weight of an n-gram of the user input, beside 1 for the instruction: inputs have more n-grams, and each says less."""

_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True, slots=True)
class WordScorer:
    """Linear scores of hashed n-grams.

    Attributes:
        weights: (2 · NUM_BUCKETS + 4, 2): n-grams of the instruction, of the user input, two lengths, whether there is
            no user input, and the constant.
        images: Whether features count images.
    """

    weights: Floats
    images: bool = True

    def features(self, questions: Sequence[ForecastQuestion]) -> Floats:
        """Reads (rows, NUM_FEATURES): input length, length of the rest of the prompt, both scores, images. O(words)."""
        scores = np.array([self.weights[c].T @ v for c, v in map(_row, questions)]).reshape(-1, 2)
        return with_scores(questions, scores, images=self.images)


def with_scores(
    questions: Sequence[ForecastQuestion], scores: NDArray[np.floating[Any]], *, images: bool = True
) -> Floats:
    """Makes the forest's input, (rows, NUM_FEATURES), from scores (rows, 2)."""
    lens = np.array([(each.user_input_len, each.rest_len) for each in questions], np.float32).reshape(-1, 2)
    return with_images(np.concatenate([lens, scores.astype(np.float32)], axis=1), questions, images=images)


def buckets(text: str) -> NDArray[np.int64]:
    """Hashes the words and pairs of neighbouring words of a text to buckets, each once, rising; case does not count."""
    words = _WORD.findall(text.lower())[:MAX_WORDS]
    grams = {*words, *map(" ".join, itertools.pairwise(words))}
    return np.unique(np.array([zlib.crc32(each.encode()) % NUM_BUCKETS for each in grams], np.int64))


def fit_words(
    questions: Sequence[ForecastQuestion],
    output_lens: NDArray[np.integer],
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> tuple[WordScorer, NDArray[np.float64]]:
    """Fits the scorer, and scores its own examples for a forest to learn from.

    Weights score the examples that they were fitted to too well, so weights fitted to other folds score each example.

    Args:
        questions: (rows,), at least as many as there are folds.
        output_lens: (rows,), in tokens.
        seed: Random seed of the folds.
        progress: Called with the number of texts read.

    Returns:
        The scorer and (rows, 2). O(folds · rounds · n-grams).
    """
    design = _design(questions, progress)
    targets = _targets(questions, output_lens)
    folds = np.arange(len(questions)) % _NUM_FOLDS
    np.random.default_rng(seed).shuffle(folds)
    scores = np.empty((len(questions), 2))
    for fold in range(_NUM_FOLDS):
        out = folds == fold
        scores[out] = design[out] @ _ridge(design[~out], targets[~out])
    return WordScorer(_ridge(design, targets).astype(np.float32)), scores


def _targets(questions: Sequence[ForecastQuestion], output_lens: NDArray[np.integer]) -> NDArray[np.float64]:
    input_lens = np.array([each.user_input_len for each in questions])
    ordered = np.sort(output_lens)
    places = (np.searchsorted(ordered, output_lens, "left") + np.searchsorted(ordered, output_lens, "right")) / (
        2 * len(ordered)
    )
    return np.stack([places, np.log1p(output_lens) - np.log1p(input_lens)], axis=1)


def _row(question: ForecastQuestion) -> tuple[NDArray[np.int64], Floats]:
    """Returns the columns that are not zero, and their values."""
    app, user = buckets(question.instruction), buckets(question.user_input) + NUM_BUCKETS
    rest = [np.log1p(question.user_input_len), np.log1p(question.rest_len), float(not question.user_input), 1.0]
    columns = np.concatenate([app, user, 2 * NUM_BUCKETS + np.arange(4)])
    values = np.concatenate([np.ones(len(app)), np.full(len(user), _USER_WEIGHT), np.array(rest)])
    return columns, values.astype(np.float32)


def _design(questions: Sequence[ForecastQuestion], progress: Callable[[int], None] | None) -> Any:
    from scipy.sparse import csr_array

    rows = []
    for number, question in enumerate(questions, 1):
        rows.append(_row(question))
        if progress is not None and (number % 256 == 0 or number == len(questions)):
            progress(number)
    begin = np.cumsum([0, *(len(columns) for columns, _ in rows)])
    columns, values = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    return csr_array((values.astype(np.float64), columns, begin), shape=(len(rows), 2 * NUM_BUCKETS + 4))


def _ridge(design: Any, targets: NDArray[np.float64]) -> NDArray[np.float64]:
    """Solves for weights, (columns, 2); the targets' means are not shrunk."""
    from scipy.sparse.linalg import lsqr

    means = targets.mean(axis=0)
    solutions = [lsqr(design, each, damp=_RIDGE**0.5, iter_lim=60)[0] for each in (targets - means).T]
    weights = np.stack(solutions, axis=1)
    weights[-1] += means  # the last column is all ones
    return weights
