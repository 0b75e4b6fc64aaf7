"""Readers, which turn questions into features for a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from core.forecast import ForecastQuestion
from predictor.embedding_cache import EmbeddingCache
from predictor.encoders import Scorer
from predictor.features import NUM_IMAGE_FEATURES, FeatureShape, Floats, input_lens, with_images
from predictor.words import WordScorer


class Reader(Protocol):
    """Maps questions to features."""

    def full(self, questions: Sequence[ForecastQuestion]) -> Floats:
        """Reads all features of the questions, shape (rows, features)."""
        ...

    def length(self, questions: Sequence[ForecastQuestion]) -> tuple[list[int], Floats]:
        """Reads without encoding; returns which questions can be read so, and their features, (rows, features)."""
        ...


class EmbeddingReader:
    """Input length and compressed embeddings (Magnus, §III-B).

    Args:
        shape: Shape of the full features; the short features lack the user input.
        cache: The cache around the encoder.
        images: Whether features count images.
    """

    def __init__(self, shape: FeatureShape, cache: EmbeddingCache, *, images: bool = True) -> None:
        self._images = images
        self._shape = shape
        self._short = replace(shape, d_user=0)
        self._cache = cache

    def full(self, questions: Sequence[ForecastQuestion]) -> Floats:
        """Encodes the user inputs, and instructions that are not cached."""
        app, user = self._cache.embed([q.instruction for q in questions], [q.user_input for q in questions])
        return with_images(self._shape.matrix(input_lens(questions), user, app), questions, images=self._images)

    def length(self, questions: Sequence[ForecastQuestion]) -> tuple[list[int], Floats]:
        """Reads the questions whose instruction's embedding is cached."""
        vectors = [self._cache.known(each.instruction) for each in questions]
        kept = [number for number, vector in enumerate(vectors) if vector is not None]
        if not kept:
            num_features = self._short.num_features + NUM_IMAGE_FEATURES * self._images
            return [], np.empty((0, num_features), np.float32)
        app = np.stack([vector for vector in vectors if vector is not None])
        read = [questions[number] for number in kept]
        return kept, with_images(self._short.matrix(input_lens(read), None, app), read, images=self._images)


class WordReader:
    """Lengths and scores of the words: reading everything costs no more than a lookup of an embedding."""

    def __init__(self, scorer: WordScorer) -> None:
        self._scorer = scorer

    def full(self, questions: Sequence[ForecastQuestion]) -> Floats:
        return self._scorer.features(questions)

    def length(self, questions: Sequence[ForecastQuestion]) -> tuple[list[int], Floats]:
        return list(range(len(questions))), self._scorer.features(questions)


class ScoreReader:
    """The score of a fine-tuned regressor, which reads whole requests only."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    def full(self, questions: Sequence[ForecastQuestion]) -> Floats:
        return self._scorer.scores(questions)[:, None]

    def length(self, questions: Sequence[ForecastQuestion]) -> tuple[list[int], Floats]:
        return [], np.empty((0, 1), np.float32)
