"""Retraining of an artefact: its forests are grown again, on later requests too; it reads requests as before.

Requests are not read twice: the log keeps their features beside the forecast, so it need not hold texts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from farsight.core.errors import InvalidValueError
from farsight.core.forecast import QUANTILES
from farsight.predictor.applications.forest import grow_by_application
from farsight.predictor.applications.reading import MODEL as APPLICATIONS
from farsight.predictor.artefact import TrainedModel, from_bytes
from farsight.predictor.features import IMAGES, Floats
from farsight.predictor.metrics import pinball
from farsight.predictor.models import FULL, LENGTH, pack, unpack
from farsight.predictor.trainer import ForestOptions, grow

MAX_FEATURES = 192
"""Most features of a request; more would make the log as large as the texts."""

LENGTH_TREES = 50
"""Trees of the smaller forest, which is used when time is short."""

TRAIN_FEATURES, TRAIN_LENS = "train.features", "train.lens"
"""Arrays of an artefact that can be trained on: (rows, features) and (rows,) of its own examples."""

FEATURE_SET = "feature_set"
"""Entry of the metadata of an artefact that a server began itself: the name of its features."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A request that ended: its features, shape (features,), and its output length in tokens."""

    features: Floats
    output_len: int


def can_be_retrained(artefact: TrainedModel) -> bool:
    """Returns whether the artefact is a forest that keeps its train set."""
    return TRAIN_FEATURES in artefact.arrays


def is_untrained(artefact: TrainedModel) -> bool:
    """Returns whether the artefact has no model yet, for it has read no example."""
    return int(artefact.metadata["num_examples"]) == 0


def learns_from_all(artefact: TrainedModel) -> bool:
    """Returns whether every ended request is an example, not only the badly predicted ones as with Magnus.

    Every one is where a server began with nothing: its train set is its memory of each application's lengths. Outputs
    that their limits ended are examples too, as for the history.
    """
    return FEATURE_SET in artefact.metadata


def feature_set(artefact: TrainedModel) -> str:
    """Names the way in which requests are read; features of different ways do not mix."""
    metadata = artefact.metadata
    if FEATURE_SET in metadata:
        return str(metadata[FEATURE_SET])
    if "words" in artefact.arrays:
        return "words-" + hashlib.sha256(np.ascontiguousarray(artefact.arrays["words"]).tobytes()).hexdigest()[:16]
    images = "-images" if metadata.get(IMAGES, False) else ""
    return f"{metadata['encoder']}-{metadata['d_user']}-{metadata['d_app']}{images}"


def samples_of(artefact: TrainedModel) -> list[Sample]:
    """Returns the artefact's train set."""
    rows, lens = artefact.arrays[TRAIN_FEATURES], artefact.arrays[TRAIN_LENS]
    return [Sample(row, int(length)) for row, length in zip(rows, lens, strict=True)]


@dataclass(frozen=True, slots=True)
class Retraining:
    """Input of a fit, which runs in a process of its own.

    Attributes:
        data: The artefact to retrain.
        features: (rows, features) of all examples, those of the artefact included.
        output_lens: (rows,), in tokens.
    """

    data: bytes
    features: Floats
    output_lens: NDArray[np.int64]


def retrain(task: Retraining) -> bytes:
    """Fits the next version; returns its artefact. O(trees rows log rows).

    Raises:
        InvalidValueError: The features are not the artefact's.
    """
    artefact = from_bytes(task.data)
    arrays, metadata = dict(artefact.arrays), dict(artefact.metadata)
    width = arrays[TRAIN_FEATURES].shape[1]
    if task.features.ndim != 2 or task.features.shape[1] != width:
        raise InvalidValueError("features", task.features.shape, f"(rows, {width})")
    options = ForestOptions(**metadata["forest"])
    grown = grow_by_application if str(metadata["model"]) == APPLICATIONS else grow
    arrays |= pack(grown(task.features, task.output_lens, options), FULL)
    if metadata.get("encoder") is not None:
        small = replace(options, num_trees=min(LENGTH_TREES, options.num_trees))
        short = np.concatenate([task.features[:, :1], task.features[:, 1 + metadata["d_user"] :]], axis=1)
        arrays |= pack(grow(short, task.output_lens, small), LENGTH)
    arrays |= {TRAIN_FEATURES: task.features, TRAIN_LENS: task.output_lens.astype(np.int32)}
    metadata |= {"version": int(metadata["version"]) + 1, "num_examples": len(task.output_lens)}
    return TrainedModel(metadata, arrays).to_bytes()


def retraining(artefact: TrainedModel, samples: Sequence[Sample]) -> Retraining:
    """Makes the input of a fit to these samples, for the version after the artefact's."""
    features = np.stack([each.features for each in samples]).astype(np.float32)
    return Retraining(artefact.to_bytes(), features, np.array([each.output_len for each in samples], np.int64))


def score(artefact: TrainedModel, samples: Sequence[Sample]) -> float:
    """Returns the mean pinball loss in tokens, over ``QUANTILES``; lower is better.

    The score of an untrained artefact is that of the best history: the quantiles of these samples themselves.
    """
    lens = np.array([each.output_len for each in samples], np.float64)
    if is_untrained(artefact):
        return pinball(np.tile(np.quantile(lens, QUANTILES), (len(lens), 1)), lens)
    forest = unpack(artefact.arrays, str(artefact.metadata["model"]), FULL)
    features = np.stack([each.features for each in samples]).astype(np.float32)
    return pinball(forest.distribution(features, QUANTILES).quantiles, lens)
