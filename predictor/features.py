"""Features of a request for a forest: its input length and compressed embeddings (Magnus, §III-B).

``x = [UIL, c(e_U), c(e_I)]``: the length of the user input in tokens, then the user input's and the instruction's
embedding, each summed in groups. The number of a request's images and their tokens follow; older artefacts have no
features of images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from farsight.core.errors import InvalidValueError
from farsight.core.forecast import ForecastQuestion

Floats = NDArray[np.float32]


def compress(embeddings: Floats, num_groups: int) -> Floats:
    """Sums each of ``num_groups`` equal runs of dimensions and divides by the root of a run's length (Magnus, §III-B).

    Args:
        embeddings: (rows, dim).
        num_groups: Divides dim; 0 leaves nothing, dim leaves all as it is.

    Returns:
        (rows, num_groups). O(rows · dim).

    Raises:
        InvalidValueError: ``num_groups`` does not divide dim.
    """
    rows, dim = embeddings.shape
    if num_groups < 0 or (num_groups and dim % num_groups):
        raise InvalidValueError("num_groups", num_groups, f"0 or a divisor of the embedding's {dim} dimensions")
    if num_groups == 0:
        return np.empty((rows, 0), np.float32)
    size = dim // num_groups
    sums = embeddings.reshape(rows, num_groups, size).sum(axis=2)
    compressed: Floats = (sums / np.sqrt(size)).astype(np.float32)
    return compressed


IMAGES = "images"
"""Entry of an artefact's metadata: whether its features count images."""

NUM_IMAGE_FEATURES = 2
"""Number of images, and their tokens together."""


def image_features(questions: Sequence[ForecastQuestion]) -> Floats:
    """Counts images, shape (rows, NUM_IMAGE_FEATURES)."""
    rows = [(len(each.image_tokens), sum(each.image_tokens)) for each in questions]
    return np.array(rows, np.float32).reshape(-1, NUM_IMAGE_FEATURES)


def with_images(features: Floats, questions: Sequence[ForecastQuestion], *, images: bool) -> Floats:
    """Appends the features of images to features (rows, features), if a model counts images."""
    return np.concatenate([features, image_features(questions)], axis=1) if images else features


@dataclass(frozen=True, slots=True)
class FeatureShape:
    """Which features a forest uses.

    Attributes:
        dim: Length of the encoder's embeddings.
        d_user: Values that the user input's embedding is compressed to; 0: it is not used.
        d_app: The same for the instruction's embedding.

    Raises:
        InvalidValueError: a number that does not divide ``dim``.
    """

    dim: int
    d_user: int = 16
    d_app: int = 4

    def __post_init__(self) -> None:
        for name in ("d_user", "d_app"):
            value = getattr(self, name)
            if value < 0 or (value and self.dim % value):
                raise InvalidValueError(name, value, f"0 or a divisor of the embedding's {self.dim} dimensions")

    @property
    def num_features(self) -> int:
        return 1 + self.d_user + self.d_app

    def matrix(self, lens: NDArray[np.integer], user: Floats | None, app: Floats | None) -> Floats:
        """Makes the forest's input, shape (rows, num_features).

        Args:
            lens: (rows,), lengths of the user inputs, in tokens.
            user: (rows, dim), embeddings of the user inputs; None if ``d_user`` is 0.
            app: (rows, dim), embeddings of the instructions; None if ``d_app`` is 0.

        Raises:
            InvalidValueError: Embeddings come from another encoder, or are missing where they are needed.
        """
        parts = [np.asarray(lens, np.float32)[:, None]]
        for name, embeddings, num_groups in (("user", user, self.d_user), ("app", app, self.d_app)):
            if num_groups == 0:
                continue
            shape = None if embeddings is None else embeddings.shape
            if embeddings is None or shape != (len(lens), self.dim):
                raise InvalidValueError(name, shape, f"embeddings of shape {(len(lens), self.dim)}")
            parts.append(compress(embeddings, num_groups))
        return np.concatenate(parts, axis=1)


def input_lens(questions: Sequence[ForecastQuestion]) -> NDArray[np.int64]:
    """Returns the lengths of the user inputs in tokens, shape (rows,)."""
    return np.array([each.user_input_len for each in questions], np.int64)
