"""From finished requests to an artefact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.errors import InvalidValueError
from core.forecast import Example
from predictor.artefact import Artefact
from predictor.encoders import Encoder
from predictor.features import FeatureShape, Floats
from predictor.linear import fit_linear
from predictor.models import FULL, LENGTH, pack
from predictor.trainer import ForestOptions, grow

Progress = Callable[[int], None]
"""Told how many texts have been encoded so far."""

MIN_EXAMPLES = 20
"""Fewer say nothing."""

_CHUNK = 256
"""Texts that are encoded between two reports of progress."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is trained.

    Attributes:
        model: ``forest`` or ``linear``.
        d_user: Values that stay of the user input's embedding; None: all.
        d_app: The same of the instruction's.
        forest: How forests are grown.
    """

    model: str = "forest"
    d_user: int | None = 16
    d_app: int | None = 4
    forest: ForestOptions = ForestOptions()


RECIPES: dict[str, Recipe] = {
    "magnus": Recipe(),
    "forest": Recipe(d_user=None, d_app=None, forest=ForestOptions(min_samples_leaf=5, max_features=0.2)),
    "linear": Recipe("linear", None, None),
}
"""By the name that ``farsight train --kind`` takes: Magnus's own, the best one found, Multi-Bin's regressor."""

LENGTH_TREES = 50
"""Of the smaller forest, which is asked when time is short."""


def train(
    examples: Sequence[Example],
    encoder: Encoder,
    recipe: Recipe,
    version: int = 1,
    progress: Progress | None = None,
) -> Artefact:
    """Trains both models of an artefact: on everything, and on the input's length with the instruction.

    Args:
        examples: Censored ones are left out: their outputs would have been longer.
        encoder: The same one must serve.
        recipe: What to train.
        version: Of the artefact; whoever trains again counts on.
        progress: Told of encoded texts.

    Raises:
        InvalidValueError: too few examples, or dimensions that do not divide the encoder's.
    """
    complete = [each for each in examples if not each.censored]
    if len(complete) < MIN_EXAMPLES:
        raise InvalidValueError("examples", len(complete), f"at least {MIN_EXAMPLES} outputs that were not cut off")
    d_user, d_app = (encoder.dim if d is None else d for d in (recipe.d_user, recipe.d_app))
    shape = FeatureShape(encoder.dim, d_user, d_app)
    app, user = embed_all(encoder, complete, progress)
    input_lens = np.array([each.question.user_input_len for each in complete])
    lens = np.array([each.output_len for each in complete])
    full = shape.matrix(input_lens, user, app)
    length = replace(shape, d_user=0).matrix(input_lens, None, app)
    metadata: dict[str, Any] = {
        "version": version,
        "model": recipe.model,
        "encoder": encoder.name,
        "dim": encoder.dim,
        "d_user": d_user,
        "d_app": d_app,
        "num_examples": len(complete),
    }
    if recipe.model == "linear":
        return Artefact(metadata, _pack_both(fit_linear(full, lens), fit_linear(length, lens)))
    metadata["forest"] = asdict(recipe.forest)
    small = replace(recipe.forest, num_trees=min(LENGTH_TREES, recipe.forest.num_trees))
    return Artefact(metadata, _pack_both(grow(full, lens, recipe.forest), grow(length, lens, small)))


def _pack_both(full: Any, length: Any) -> dict[str, NDArray[Any]]:
    return {**pack(full, FULL), **pack(length, LENGTH)}


def embed_all(
    encoder: Encoder, examples: Sequence[Example], progress: Progress | None = None
) -> tuple[Floats, Floats]:
    """(rows, dim) of the instructions and of the user inputs; each text is encoded once."""
    questions = [each.question for each in examples]
    texts = list(dict.fromkeys([text for each in questions for text in (each.instruction, each.user_input)]))
    texts.sort(key=len)  # a batch is padded to its longest text
    rows = np.empty((len(texts), encoder.dim), np.float32)
    for begin in range(0, len(texts), _CHUNK):
        rows[begin : begin + _CHUNK] = encoder.encode(texts[begin : begin + _CHUNK])
        if progress is not None:
            progress(min(begin + _CHUNK, len(texts)))
    place = {text: number for number, text in enumerate(texts)}
    return rows[[place[each.instruction] for each in questions]], rows[[place[each.user_input] for each in questions]]
