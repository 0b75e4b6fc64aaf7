"""Hashed words of a request, for a log that keeps no text.

A gram is a word, a pair of neighbouring words, or the opening or the last word of a text. Its number is a hash under
the secret of the keys and the tenant's name, so tenants share no numbers and no weights.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import zlib
from collections.abc import Sequence

import numpy as np

from farsight.core.forecast import ForecastQuestion
from farsight.predictor.features import Floats

NUM_GRAMS = 96
"""Most grams of a request."""

GRAM_BITS = 22
"""Bits of a gram's number, which float32 holds exactly."""

NO_GRAM = -1
"""Value of the columns that a short request leaves empty."""

FIRST_WORDS, LAST_WORDS = 32, 12
"""Words read at the beginning of a user input and at its end: what is asked stands there, what it is about between."""

INSTRUCTION_WORDS = 8
"""Words read of an instruction; all of it is in its key."""

_READ_CHARS = 8
"""Characters read for each word, at most."""

_WORD = re.compile(r"\w+|[^\w\s]")


def gram_ids(questions: Sequence[ForecastQuestion], secret: bytes) -> Floats:
    """Reads the grams of each question, shape (rows, NUM_GRAMS): whole numbers, each once; then ``NO_GRAM``."""
    rows = np.full((len(questions), NUM_GRAMS), NO_GRAM, np.float32)
    multipliers: dict[str, int] = {}
    for row, question in zip(rows, questions, strict=True):
        multiplier = multipliers.get(question.tenant)
        if multiplier is None:
            multiplier = multipliers[question.tenant] = _multiplier(secret, question.tenant)
        found = [zlib.crc32(gram.encode("utf-8", "replace")) for gram in _grams(question)[:NUM_GRAMS]]
        # The highest bits of the product: a family of hashes of which the secret chooses one for each tenant.
        row[: len(found)] = (np.array(found, np.uint64) * np.uint64(multiplier)) >> np.uint64(64 - GRAM_BITS)
    return rows


def _multiplier(secret: bytes, tenant: str) -> int:
    digest = hashlib.blake2b(tenant.encode("utf-8", "backslashreplace"), digest_size=8, key=secret, person=b"grams")
    return int.from_bytes(digest.digest()) | 1


def _grams(question: ForecastQuestion) -> list[str]:
    """Returns the grams, each once: openings first, then words, then pairs."""
    text = question.user_input
    words = _words(text[: _READ_CHARS * FIRST_WORDS])[:FIRST_WORDS]
    if len(text) > _READ_CHARS * FIRST_WORDS:
        words += _words(text[-_READ_CHARS * LAST_WORDS :])[-LAST_WORDS:]
    grams = [f"^{' '.join(words[:length])}" for length in (1, 2, 3)] if words else []
    grams += [f"{word}$" for word in words[-1:]]
    given = _words(question.instruction[: _READ_CHARS * INSTRUCTION_WORDS])[:INSTRUCTION_WORDS]
    grams += [f"<{word}" for word in given]
    grams += words
    grams += map(" ".join, itertools.pairwise(words))
    return list(dict.fromkeys(grams))


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
