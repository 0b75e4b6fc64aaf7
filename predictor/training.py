"""From finished requests to an artefact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farsight.core.errors import InvalidValueError
from farsight.core.forecast import Example
from farsight.predictor.artefact import TrainedModel
from farsight.predictor.encoders import Encoder, probe_of
from farsight.predictor.features import IMAGES, FeatureShape, Floats, input_lens, with_images
from farsight.predictor.linear import fit_linear
from farsight.predictor.models import FULL, LENGTH, pack
from farsight.predictor.retraining import LENGTH_TREES, MAX_FEATURES, TRAIN_FEATURES, TRAIN_LENS
from farsight.predictor.trainer import ForestOptions, grow
from farsight.predictor.words import fit_words, with_scores

Progress = Callable[[int], None]
"""Called with the number of texts read so far."""

MIN_EXAMPLES = 20
"""Fewest examples that a training accepts."""

_CHUNK = 256
"""Texts that are encoded between two reports of progress."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe of a training.

    Attributes:
        model: ``forest`` or ``linear``.
        reads: ``embeddings`` of an encoder, or ``words``, which need none (forests only).
        d_user: Values that stay of the user input's embedding; None: all.
        d_app: The same for the instruction's embedding.
        forest: How forests are grown.
    """

    model: str = "forest"
    reads: str = "embeddings"
    d_user: int | None = 16
    d_app: int | None = 4
    forest: ForestOptions = field(default_factory=ForestOptions)


RECIPES: dict[str, Recipe] = {
    "words": Recipe(reads="words", d_user=None, d_app=None, forest=ForestOptions(min_samples_leaf=15)),
    "forest": Recipe(forest=ForestOptions(min_samples_leaf=10)),
    "magnus": Recipe(),
    "linear": Recipe("linear", d_user=None, d_app=None),
}
"""Recipes by the name that ``farsight train --kind`` takes: the cheapest and best one found; a forest over Magnus's
features; Magnus's own, with trees grown out; Multi-Bin's regressor."""


def train(
    examples: Sequence[Example],
    encoder: Encoder | None,
    recipe: Recipe,
    version: int = 1,
    progress: Progress | None = None,
) -> TrainedModel:
    """Trains an artefact: a model of all features, and a model of input length and instruction where that is cheaper.

    Args:
        examples: Censored examples are left out: their outputs would have been longer.
        encoder: The same one must serve; None for a recipe that reads words.
        recipe: What to train.
        version: Version of the artefact; a retraining adds 1.
        progress: Called with the number of texts read.

    Raises:
        InvalidValueError: too few examples, no encoder, or dimensions that do not divide the encoder's.
    """
    complete = complete_ones(examples)
    metadata: dict[str, Any] = {"version": version, "model": recipe.model, "num_examples": len(complete), IMAGES: True}
    if recipe.model == "forest":
        metadata["forest"] = asdict(recipe.forest)
    if recipe.reads == "words":
        return _train_on_words(complete, recipe, metadata, progress)
    if encoder is None:
        raise InvalidValueError("encoder", None, "an encoder: this kind reads embeddings")
    return _train_on_embeddings(complete, encoder, recipe, metadata, progress)


def complete_ones(examples: Sequence[Example]) -> list[Example]:
    """Returns the examples that were not cut off.

    Raises:
        InvalidValueError: Too few examples are left.
    """
    complete = [each for each in examples if not each.censored]
    if len(complete) < MIN_EXAMPLES:
        raise InvalidValueError("examples", len(complete), f"at least {MIN_EXAMPLES} outputs that were not cut off")
    return complete


def _train_on_words(
    examples: Sequence[Example], recipe: Recipe, metadata: dict[str, Any], progress: Progress | None
) -> TrainedModel:
    questions = [each.question for each in examples]
    lens = np.array([each.output_len for each in examples])
    scorer, scores = fit_words(questions, lens, recipe.forest.seed, progress)
    features = with_scores(questions, scores)
    forest = grow(features, lens, recipe.forest)
    return TrainedModel(metadata, {"words": scorer.weights, **pack(forest, FULL), **_kept(features, lens)})


def _train_on_embeddings(
    examples: Sequence[Example], encoder: Encoder, recipe: Recipe, metadata: dict[str, Any], progress: Progress | None
) -> TrainedModel:
    d_user, d_app = (encoder.dim if d is None else d for d in (recipe.d_user, recipe.d_app))
    shape = FeatureShape(encoder.dim, d_user, d_app)  # raises before anything is encoded
    metadata |= {"encoder": encoder.name, "dim": encoder.dim, "d_user": d_user, "d_app": d_app}
    app, user = embed_all(encoder, examples, progress)
    questions = [each.question for each in examples]
    own_lens = input_lens(questions)
    lens = np.array([each.output_len for each in examples])
    full = with_images(shape.matrix(own_lens, user, app), questions, images=True)
    short = with_images(replace(shape, d_user=0).matrix(own_lens, None, app), questions, images=True)
    probe = probe_of(encoder)
    if recipe.model == "linear":
        return TrainedModel(metadata, {**_pack_both(fit_linear(full, lens), fit_linear(short, lens)), **probe})
    small = replace(recipe.forest, num_trees=min(LENGTH_TREES, recipe.forest.num_trees))
    forests = _pack_both(grow(full, lens, recipe.forest), grow(short, lens, small))
    return TrainedModel(metadata, {**forests, **_kept(full, lens), **probe})


def _kept(features: Floats, output_lens: NDArray[np.integer]) -> dict[str, NDArray[Any]]:
    """Returns arrays of the examples themselves, for ``retraining``; none where there are too many features."""
    if features.shape[1] > MAX_FEATURES:
        return {}
    return {TRAIN_FEATURES: features, TRAIN_LENS: output_lens.astype(np.int32)}


def _pack_both(full: Any, length: Any) -> dict[str, NDArray[Any]]:
    return {**pack(full, FULL), **pack(length, LENGTH)}


def embed_all(encoder: Encoder, examples: Sequence[Example], progress: Progress | None = None) -> tuple[Floats, Floats]:
    """Embeds the instructions and the user inputs, (rows, dim) each; each text is encoded once."""
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
