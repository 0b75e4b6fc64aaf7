"""The artefacts that a server begins with if it has no trained one."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from farsight.predictor.applications.reading import MODEL, NUM_FEATURES, SECRET
from farsight.predictor.artefact import TrainedModel
from farsight.predictor.encoders import Encoder, probe_of
from farsight.predictor.features import IMAGES, NUM_IMAGE_FEATURES, FeatureShape
from farsight.predictor.retraining import FEATURE_SET, TRAIN_FEATURES, TRAIN_LENS
from farsight.predictor.trainer import ForestOptions

FOREST = ForestOptions(num_trees=50, min_samples_leaf=8, samples_per_leaf=16, log_target=True)

D_USER, D_APP = 16, 4
"""Values that stay of the embeddings of a user input and of an instruction, as in Magnus."""

GROWTH = 1.0
"""The forecaster trains again once its train set has grown by this share: 100 finished requests, 200, 400 and so on.
A fit takes two seconds of a core, most of them for imports."""

MAX_EXAMPLES = 4000
"""Most examples of its train set, the newest: a fit to them takes about two seconds of one core."""


def untrained(weights: str, secret: bytes, num_trees: int = FOREST.num_trees) -> TrainedModel:
    """Makes the artefact that a server begins with, version 0: it says how requests are read and nothing else.

    Args:
        weights: Names the served weights: outputs of other weights are no examples for these.
        secret: As in ``raw_features``; rows with keys of another secret are no examples either.
        num_trees: Trees of the forest that is grown later.
    """
    secret_name = hashlib.blake2b(b"name", digest_size=8, key=secret).hexdigest()
    metadata: dict[str, Any] = {
        "version": 0,
        "model": MODEL,
        "num_examples": 0,
        "forest": asdict(replace(FOREST, num_trees=num_trees)),
        FEATURE_SET: f"{MODEL}-5 {secret_name} {weights}",
    }
    features, lens = np.empty((0, NUM_FEATURES), np.float32), np.empty(0, np.int32)
    kept = np.frombuffer(secret, np.uint8)
    return TrainedModel(metadata, {TRAIN_FEATURES: features, TRAIN_LENS: lens, SECRET: kept})


def untrained_with_encoder(encoder: Encoder, weights: str, num_trees: int = FOREST.num_trees) -> TrainedModel:
    """Makes such an artefact over Magnus's features (USIN, section III-B): input length and compressed embeddings.

    Args:
        encoder: The encoder that reads requests from now on.
        weights: As in ``untrained``.
        num_trees: As in ``untrained``.

    Raises:
        InvalidValueError: Field ``d_user``: the encoder's dimensions cannot be compressed to so many values.
    """
    shape = FeatureShape(encoder.dim, D_USER, D_APP)
    probe = probe_of(encoder)
    # The name may stay while the weights behind it change; features of two encoders do not mix.
    print_of = hashlib.blake2b(np.round(next(iter(probe.values())), 2).tobytes(), digest_size=8).hexdigest()
    metadata: dict[str, Any] = {
        "version": 0,
        "model": "forest",
        "num_examples": 0,
        "forest": asdict(replace(FOREST, num_trees=num_trees, min_samples_leaf=5)),
        "encoder": encoder.name,
        "dim": encoder.dim,
        "d_user": D_USER,
        "d_app": D_APP,
        IMAGES: True,
        FEATURE_SET: f"usin-2 {encoder.name} {print_of} {weights}",
    }
    features, lens = np.empty((0, shape.num_features + NUM_IMAGE_FEATURES), np.float32), np.empty(0, np.int32)
    return TrainedModel(metadata, {TRAIN_FEATURES: features, TRAIN_LENS: lens, **probe})
