"""What is foreseen, and who foresees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
"""The levels at which every forecast gives the output length."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """A distribution of output lengths, in tokens.

    Attributes:
        mean: Expected output length.
        quantiles: Output lengths at ``QUANTILES``, not falling.
        num_samples: Finished requests it rests on; 0 means that nothing is known yet and the rest is a prior.
        source: Who made it, such as ``history``.
        version: Of the model behind it; rises when it learns.
    """

    mean: float
    quantiles: tuple[float, ...]
    num_samples: int
    source: str
    version: int


class Predictor(Protocol):
    """Forecasts output lengths and learns from finished requests."""

    def forecast(self) -> Forecast: ...

    def learn(self, output_lens: Sequence[int]) -> None: ...
