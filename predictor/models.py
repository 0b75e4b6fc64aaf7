"""Models of an artefact by name: to arrays and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from farsight.predictor.applications.forest import ApplicationForest
from farsight.predictor.applications.reading import MODEL as APPLICATIONS
from farsight.predictor.artefact import ArtefactError, TrainedModel
from farsight.predictor.features import Floats
from farsight.predictor.forest import Forest, LengthDistributions
from farsight.predictor.linear import BinnedLinear

BERT = "bert"
"""Multi-Bin's fine-tuned regressor: its score is the only feature of a model with bins."""

FULL = "full"
"""Name of the model that uses all features."""

LENGTH = "length"
"""Name of the model that uses the input's length and the instruction."""


class Model(Protocol):
    """Maps features to distributions of output lengths."""

    def distribution(self, features: Floats, levels: Sequence[float]) -> LengthDistributions: ...


_MODELS: dict[str, type[Forest] | type[BinnedLinear]] = {
    "forest": Forest,
    "linear": BinnedLinear,
    BERT: BinnedLinear,
    APPLICATIONS: ApplicationForest,
}


def pack(model: Forest | BinnedLinear, name: str) -> dict[str, NDArray[Any]]:
    """Takes a model apart into arrays, each called ``NAME.FIELD``."""
    return {f"{name}.{each.name}": np.asarray(getattr(model, each.name)) for each in fields(model)}


def unpack(arrays: Mapping[str, NDArray[Any]], kind: str, name: str) -> Model:
    """Makes the model that ``pack`` took apart.

    Raises:
        KeyError: An array is missing, or there is no such kind.
        ValueError: The arrays do not fit together.
    """
    model = _MODELS[kind]
    found = {each.name: arrays[f"{name}.{each.name}"] for each in fields(model)}
    values: dict[str, Any] = {field: array if array.ndim else int(array) for field, array in found.items()}
    made = model(**values)
    made.check()
    return made


def check_artefact(artefact: TrainedModel) -> None:
    """
    Raises:
        ArtefactError: A model of the artefact is not there, or its arrays do not fit together.
    """
    try:
        for name in (FULL, LENGTH) if artefact.metadata.get("encoder") is not None else (FULL,):
            unpack(artefact.arrays, str(artefact.metadata["model"]), name)
    except (KeyError, TypeError, ValueError) as error:
        raise ArtefactError(f"the artefact lacks {error}; train it again") from error
