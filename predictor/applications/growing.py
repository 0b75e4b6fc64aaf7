"""Grows the forest of the forecaster by application."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from core.errors import InvalidValueError
from predictor.applications.forest import NUM_DERIVED, ApplicationForest, statistics_of
from predictor.applications.reading import KEYS, NO_KEY, NUM_TEXT_FEATURES, WIDTHS
from predictor.features import Floats
from predictor.forest import Forest
from predictor.trainer import ForestOptions, grow

UNKNOWN = 0.2
"""Share of the examples that are also shown as requests of an unknown application."""

_NUM_FOLDS = 5


def grow_by_application(raw: Floats, output_lens: NDArray[np.integer], options: ForestOptions) -> ApplicationForest:
    """Grows a forest over statistics of applications.

    An example's own length is part of its application's statistics. A forest grown on these would trust them too much,
    so each example gets the statistics of the other folds. Some examples are used a second time, as requests of an
    application without examples, so that an unknown application gets the law of all, not of one that resembles it.

    Args:
        raw: (rows, one of ``WIDTHS``), from ``raw_features``.
        output_lens: (rows,), in tokens.
        options: How the forest is grown; its seed also draws the folds.

    Raises:
        InvalidValueError: fewer rows than folds, or rows of another width.
    """
    if raw.ndim != 2 or raw.shape[1] not in WIDTHS or len(raw) < _NUM_FOLDS:
        raise InvalidValueError("features", raw.shape, f"({_NUM_FOLDS} rows or more, {WIDTHS[-1]})")
    folds = np.arange(len(raw)) % _NUM_FOLDS
    rng = np.random.default_rng(options.seed)
    rng.shuffle(folds)
    derived = np.empty((len(raw), NUM_DERIVED + raw.shape[1] - NUM_TEXT_FEATURES), np.float32)
    for fold in range(_NUM_FOLDS):
        out = folds == fold
        derived[out] = statistics_of(raw[~out], output_lens[~out]).derived(raw[out])
    known = statistics_of(raw, output_lens)
    unknown = rng.permutation(len(raw))[: max(round(UNKNOWN * len(raw)), 1)]
    nameless = raw[unknown]
    for columns in KEYS:
        nameless[:, columns] = NO_KEY
    rows = np.concatenate([derived, known.derived(nameless)])
    forest = grow(rows, np.concatenate([output_lens, output_lens[unknown]]), options)
    return ApplicationForest(
        **{each.name: getattr(forest, each.name) for each in fields(Forest)}, keys=known.keys, key_sums=known.sums
    )
