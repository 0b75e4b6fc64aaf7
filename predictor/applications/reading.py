"""What the forecaster by application reads of a request: lengths, and keys of its application. No text, no encoder."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from core.forecast import ForecastQuestion
from predictor.features import Floats

MODEL = "applications"
"""Name of the model in an artefact."""

NUM_FEATURES = 5
"""Length of the user input, of the rest of the prompt, the limit of the output, and two keys."""

KEYS = (3, 4)
"""Columns of the keys: the whole instruction, and the opening of the prompt."""

NO_KEY = -1
"""No application has this key."""

OPENING_WORDS = 8
"""Words of the opening: applications without an instruction of their own often begin their prompts alike."""

READ_CHARS = 4096
"""Most characters of an instruction that its key depends on: bounds the time of a forecast."""

_KEY_BYTES = 3
"""A key is an integer below 2**24, which float32 holds exactly."""


def raw_features(questions: Sequence[ForecastQuestion]) -> Floats:
    """What is logged of the questions, shape (rows, NUM_FEATURES)."""
    rows = [
        (
            each.user_input_len,
            max(each.prompt_len - each.user_input_len, 0),
            each.max_new_tokens,
            _key(each.tenant, "instruction", each.instruction[:READ_CHARS]),
            _key(each.tenant, "opening", _opening(each)),
        )
        for each in questions
    ]
    return np.array(rows, np.float32).reshape(-1, NUM_FEATURES)


class ApplicationReader:
    """``Reader`` of raw features; reading everything costs some microseconds."""

    def full(self, questions: Sequence[ForecastQuestion]) -> Floats:
        return raw_features(questions)

    def length(self, questions: Sequence[ForecastQuestion]) -> tuple[list[int], Floats]:
        return list(range(len(questions))), raw_features(questions)


def _opening(question: ForecastQuestion) -> str:
    text = (question.instruction or question.user_input)[:READ_CHARS]
    return " ".join(text.split(maxsplit=OPENING_WORDS)[:OPENING_WORDS])


def _key(tenant: str, kind: str, text: str) -> int:
    """The tenant is part of the key, so that its lengths by application serve its own requests.

    The hash has no secret: a tenant who knows another's name and text can search for a text with the same key.
    """
    digest = hashlib.blake2b(repr((tenant, kind, text)).encode("utf-8", "backslashreplace"), digest_size=_KEY_BYTES)
    return int.from_bytes(digest.digest())
