"""The features that the forecaster by application reads: lengths, keys, the input's form, how it was called, words.

No encoder reads the request, and no word of it is kept: keys and words are hashes. The input's form is its kinds of
characters: within one application inputs differ in kind, and outputs with them. Code has brackets and line breaks, a
table has digits, another script has other bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from farsight.core.forecast import ForecastQuestion
from farsight.predictor.applications.grams import NUM_GRAMS, gram_ids
from farsight.predictor.features import NUM_IMAGE_FEATURES, Floats, image_features

READ_CHARS = 4096
"""Most characters that are read of a text, for its form and for its key: bounds the time of a forecast."""

KINDS = (
    "\n\r",
    " \t",
    "0123456789",
    "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    ".!?",
    "{}()[]<>=;+*/\\_|&%#@$^~",
    ",:\"'`-",
    bytes(range(128, 256)).decode("latin-1"),
)
"""Kinds of bytes in UTF-8: line breaks, blanks, digits, capitals, ends of sentences, signs of code, other punctuation,
and bytes that are not ASCII. The rest are small letters."""

NUM_FORM_FEATURES = 1 + len(KINDS)
"""Length of the text in characters, and the share of each kind among the bytes that were read."""


def form_features(questions: Sequence[ForecastQuestion]) -> Floats:
    """Reads the form of each user input, or else of its instruction; shape (rows, NUM_FORM_FEATURES)."""
    return np.array([_form(each.user_input or each.instruction) for each in questions], np.float32).reshape(
        -1, NUM_FORM_FEATURES
    )


def _table() -> NDArray[np.int64]:
    kind_of = np.zeros(256, np.int64)
    for kind, members in enumerate(KINDS, 1):
        kind_of[list(members.encode("latin-1"))] = kind
    return kind_of


_KIND_OF = _table()


def _form(text: str) -> list[float]:
    read = np.frombuffer(text[:READ_CHARS].encode("utf-8", "surrogatepass"), np.uint8)
    counts = np.bincount(_KIND_OF[read], minlength=1 + len(KINDS))
    return [len(text), *(counts[1:] / max(len(read), 1))]


MODEL = "applications"
"""Name of the model in an artefact."""

KEY_PARTS, PART_BITS = 3, 21
"""A key has 63 bits. It is kept in numbers of 21 bits, each of which float32 holds exactly."""

NUM_LENGTHS = 3
"""Length of the user input, of the rest of the prompt, and the limit of the output."""

KEYS = ("instruction", "opening", "client", "call", "tenant")
"""The keys of a request: the whole instruction; the opening of the prompt; the client; the client's instruction with
the form of its call and the magnitude of its limit; the tenant. Each holds the tenant too."""

FORM_AT = NUM_LENGTHS + len(KEYS) * KEY_PARTS
"""The first column behind the keys: images, the form of the input, and the form of the call."""

NUM_CALL_FEATURES = 3
"""Whether the client reads a stream, offers tools, and demands a schema."""

GRAMS_AT = FORM_AT + NUM_IMAGE_FEATURES + NUM_FORM_FEATURES + NUM_CALL_FEATURES
"""The first of ``NUM_GRAMS`` columns of hashed words."""

NUM_FEATURES = GRAMS_AT + NUM_GRAMS

NO_KEY = -1
"""Value of all columns of a key that no application has."""

OPENING_WORDS = 8
"""Words of the opening: applications without an instruction of their own often begin their prompts alike."""

SECRET, SECRET_BYTES = "key.secret", 32
"""Array of an artefact that holds the secret of its keys, and its length."""


def raw_features(questions: Sequence[ForecastQuestion], secret: bytes) -> Floats:
    """Reads the features that are logged of the questions, shape (rows, NUM_FEATURES).

    Args:
        secret: ``SECRET_BYTES`` bytes that clients do not know, the same for all rows that train one model.
    """
    num = len(questions)
    rows = [(each.user_input_len, each.rest_len, each.max_new_tokens, *_keys(secret, each)) for each in questions]
    calls = [(each.call.streams, each.call.has_tools, each.call.has_schema) for each in questions]
    parts = [
        np.array(rows, np.float32).reshape(num, FORM_AT),
        image_features(questions),
        form_features(questions),
        np.array(calls, np.float32).reshape(num, NUM_CALL_FEATURES),
        gram_ids(questions, secret),
    ]
    return np.concatenate(parts, axis=1)


def columns_of(key: str) -> slice:
    """Returns the columns of one of ``KEYS``."""
    begin = NUM_LENGTHS + KEYS.index(key) * KEY_PARTS
    return slice(begin, begin + KEY_PARTS)


def keys_of(raw: Floats, key: str) -> NDArray[np.int64]:
    """Returns one of ``KEYS`` for each row of ``raw_features``."""
    high, middle, low = raw[:, columns_of(key)].astype(np.int64).T
    found: NDArray[np.int64] = (high << 2 * PART_BITS) | (middle << PART_BITS) | low
    return found


class ApplicationReader:
    """``Reader`` of raw features; reading everything costs some ten microseconds.

    Args:
        secret: As in ``raw_features``.

    Raises:
        ValueError: The secret has another length than ``SECRET_BYTES``.
    """

    def __init__(self, secret: bytes) -> None:
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"a secret of {SECRET_BYTES} bytes")
        self._secret = secret

    def full(self, questions: Sequence[ForecastQuestion]) -> Floats:
        return raw_features(questions, self._secret)

    def length(self, questions: Sequence[ForecastQuestion]) -> tuple[list[int], Floats]:
        return list(range(len(questions))), self.full(questions)


def _opening(question: ForecastQuestion) -> str:
    text = (question.instruction or question.user_input)[:READ_CHARS]
    return " ".join(text.split(maxsplit=OPENING_WORDS)[:OPENING_WORDS])


def _keys(secret: bytes, question: ForecastQuestion) -> list[int]:
    """Returns the numbers of ``KEYS``."""
    call, instruction = question.call, question.instruction[:READ_CHARS]
    magnitude = question.max_new_tokens.bit_length()
    texts: tuple[object, ...] = (
        instruction,
        _opening(question),
        call.client,
        (call, instruction, magnitude),
        "",
    )
    numbers = []
    for kind, text in zip(KEYS, texts, strict=True):
        numbers += _key(secret, question.tenant, kind, text)
    return numbers


def _key(secret: bytes, tenant: str, kind: str, text: object) -> list[int]:
    """Hashes a text. The key holds the tenant, so that a tenant's lengths serve its own requests alone; the secret
    keeps a tenant from searching for a text that has the key of another tenant's."""
    text_bytes = repr((tenant, kind, text)).encode("utf-8", "backslashreplace")
    number = int.from_bytes(hashlib.blake2b(text_bytes, digest_size=8, key=secret).digest())
    return [(number >> part * PART_BITS) & ((1 << PART_BITS) - 1) for part in reversed(range(KEY_PARTS))]
