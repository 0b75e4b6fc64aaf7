"""What becomes of a question before a model sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from core.forecast import ForecastQuestion
from predictor.embedding_cache import EmbeddingCache
from predictor.features import FeatureShape, Floats, input_lens
from predictor.words import WordScorer


class Reader(Protocol):
    """Maps questions to features."""

    def full(self, questions: Sequence[ForecastQuestion]) -> Floats:
        """(rows, features) of everything that is known."""
        ...

    def length(self, questions: Sequence[ForecastQuestion]) -> tuple[list[int], Floats]:
        """Without encoding anything: which of the questions can be read so, and (those rows, features)."""
        ...


class EmbeddingReader:
    """Input length and compressed embeddings (Magnus, §III-B).

    Args:
        shape: Of the full features; the short ones lack the user input.
        cache: Around the encoder.
    """

    def __init__(self, shape: FeatureShape, cache: EmbeddingCache) -> None:
        self._shape = shape
        self._short = replace(shape, d_user=0)
        self._cache = cache

    def full(self, questions: Sequence[ForecastQuestion]) -> Floats:
        """Encodes the user inputs, and instructions that are not kept."""
        app, user = self._cache.embed([q.instruction for q in questions], [q.user_input for q in questions])
        return self._shape.matrix(input_lens(questions), user, app)

    def length(self, questions: Sequence[ForecastQuestion]) -> tuple[list[int], Floats]:
        """Those whose instruction's embedding is kept."""
        vectors = [self._cache.known(each.instruction) for each in questions]
        kept = [number for number, vector in enumerate(vectors) if vector is not None]
        if not kept:
            return [], np.empty((0, self._short.num_features), np.float32)
        app = np.stack([vector for vector in vectors if vector is not None])
        return kept, self._short.matrix(input_lens([questions[number] for number in kept]), None, app)


class WordReader:
    """Lengths and scores of the words: reading everything costs no more than looking an embedding up does elsewhere."""

    def __init__(self, scorer: WordScorer) -> None:
        self._scorer = scorer

    def full(self, questions: Sequence[ForecastQuestion]) -> Floats:
        return self._scorer.features(questions)

    def length(self, questions: Sequence[ForecastQuestion]) -> tuple[list[int], Floats]:
        return list(range(len(questions))), self._scorer.features(questions)
