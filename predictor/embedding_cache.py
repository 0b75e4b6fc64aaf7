"""A cache of instruction embeddings: an application's instruction is the same at each request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from core.errors import InvalidValueError
from predictor.encoders import Encoder
from predictor.features import Floats


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
