"""Readers, which turn questions into features for a model; an application's instruction is embedded once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from farsight.core.errors import InvalidValueError
from farsight.core.forecast import ForecastQuestion
from farsight.predictor.encoders import Encoder, Scorer
from farsight.predictor.features import NUM_IMAGE_FEATURES, FeatureShape, Floats, input_lens, with_images
from farsight.predictor.words import WordScorer


class EmbeddingCache:
    """Keeps the embeddings of the most recently used instructions.

    User inputs are not kept: an input seldom comes twice.

    Args:
        encoder: Computes the embeddings that the cache lacks.
        capacity: Instructions that are kept, at least 1; 1.5 kB each at 384 dimensions.

    Raises:
        InvalidValueError: a capacity below 1.
    """

    def __init__(self, encoder: Encoder, capacity: int = 1024) -> None:
        if capacity < 1:
            raise InvalidValueError("capacity", capacity, "an integer >= 1")
        self.encoder = encoder
        self._capacity = capacity
        self._kept: OrderedDict[str, Floats] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def known(self, instruction: str) -> Floats | None:
        """Returns the embedding, shape (dim,), if it is kept, and marks it as used. Never encodes. O(1)."""
        vector = self._kept.get(instruction)
        if vector is not None:
            self._kept.move_to_end(instruction)
        return vector

    def embed(self, instructions: Sequence[str], user_inputs: Sequence[str]) -> tuple[Floats, Floats]:
        """Embeds both, one row for each request, in one call of the encoder (Magnus packs them into one batch).

        Returns:
            (rows, dim) of the instructions and (rows, dim) of the user inputs.
        """
        new = [each for each in dict.fromkeys(instructions) if each not in self._kept]
        encoded = self.encoder.encode([*new, *user_inputs])
        # Embeddings of this call stay available, even if the cache evicts them.
        vectors = dict(zip(new, encoded, strict=False))
        for each in dict.fromkeys(instructions):
            vector = self.known(each)
            vectors[each] = vectors[each] if vector is None else vector
        for each in new:
            self._kept[each] = vectors[each].copy()  # not a view that keeps the whole batch alive
            if len(self._kept) > self._capacity:
                self._kept.popitem(last=False)
        rows = [vectors[each] for each in instructions]
        app = np.stack(rows) if rows else np.empty((0, self.encoder.dim), np.float32)
        return app, encoded[len(new) :]


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
