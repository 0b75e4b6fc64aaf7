"""How often a sequence holds each token: kept as it grows, so that penalties cost nothing for its length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class TokenCounts:
    """The tokens of a prompt and of the output so far, each once.

    Attributes:
        num_tokens: Tokens that are counted.
    """

    def __init__(self, token_ids: Sequence[int], prompt_len: int) -> None:
        self._ids = np.unique(np.array(token_ids[:prompt_len], dtype=np.int32))
        self._counts = np.zeros(len(self._ids), dtype=np.int32)
        self._places = {token: place for place, token in enumerate(self._ids.tolist())}
        self.num_tokens = min(prompt_len, len(token_ids))
        self.advance(token_ids)

    @property
    def ids(self) -> NDArray[np.int32]:
        """Ids of the tokens."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> NDArray[np.int32]:
        """How often the output holds each; 0 for those of the prompt alone."""
        return self._counts[: len(self._places)]

    def advance(self, token_ids: Sequence[int]) -> None:
        """Counts the tokens that have come.

        Args:
            token_ids: All of them: those counted before, then the new ones.
        """
        places = self._places
        for token in token_ids[self.num_tokens :]:
            place = places.setdefault(token, len(places))
            if place == len(self._ids):
                self._grow()
            self._ids[place] = token
            self._counts[place] += 1
        self.num_tokens = len(token_ids)

    def plus(self, token_ids: Sequence[int]) -> TokenCounts:
        """Returns the counts with further tokens of the output; these stay as they are."""
        more = TokenCounts((), 0)
        more._ids, more._counts, more._places = self.ids.copy(), self.counts.copy(), dict(self._places)
        more.advance(token_ids)
        more.num_tokens = self.num_tokens + len(token_ids)
        return more

    def _grow(self) -> None:
        size = max(16, 2 * len(self._ids))
        for name in ("_ids", "_counts"):
            values = getattr(self, name)
            setattr(self, name, np.concatenate([values, np.zeros(size - len(values), dtype=np.int32)]))
