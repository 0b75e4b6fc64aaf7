"""Small sets of finished requests, and an encoder of which the vectors are known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from farsight.core.forecast import Example, ForecastQuestion
from farsight.predictor.features import Floats


def question(instruction: str = "sum up", user_input: str = "a b", limit: int = 10_000) -> ForecastQuestion:
    input_len = len(user_input)
    return ForecastQuestion("r", instruction, user_input, input_len, input_len + len(instruction), limit)


def examples(num: int = 300, seed: int = 0) -> list[Example]:
    """Two applications: one answers as long as its input, the other three times so; ``long`` in it doubles that."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(num):
        tripled, long = rng.integers(2), rng.integers(2)
        text = " ".join(["word"] * rng.integers(5, 50) + ["long"] * long)
        asked = question("tell all of" if tripled else "repeat", text)
        found.append(Example(asked, int(len(text) * (1 + 2 * tripled) * (1 + long) * rng.uniform(0.9, 1.1))))
    return found


class CountingEncoder:
    """Letters counted: texts that differ have vectors that differ. Notes what it was asked for."""

    name = "letters"
    dim = 8

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def encode(self, texts: Sequence[str]) -> Floats:
        self.asked.append(list(texts))
        rows = [[text.count(letter) / (1 + len(text)) for letter in "aelnorst"] for text in texts]
        return np.array(rows, np.float32).reshape(-1, self.dim)
