"""Forecasts from what a request says: its input's length and text and its application's instruction."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from core.errors import InvalidValueError
from core.forecast import QUANTILES, Forecast, ForecastQuestion
from predictor.artefact import Artefact, ArtefactError
from predictor.embedding_cache import EmbeddingCache
from predictor.encoders import Encoder
from predictor.features import FeatureShape, Floats
from predictor.history import HistoryPredictor
from predictor.models import FULL, LENGTH, unpack
from predictor.quantiles import Distribution
from predictor.shedding import Effort


class TextPredictor:
    """Serves a trained artefact; ``forecast`` takes as much effort as it is told to.

    ``Forecast.source`` says what a forecast rests on: ``forest`` (or the artefact's kind of model) if the user input was
    read, ``forest-length`` if its length and the instruction were, ``history`` if the request was not looked at.

    Args:
        artefact: From ``training.train``.
        encoder: The one that it was trained with.
        history: For what the artefact is too dear for; not learnt by this object.
        cache_size: Instructions whose embeddings are kept.

    Raises:
        ArtefactError: the artefact lacks something.
        InvalidValueError: field ``encoder``: another one than in training.
    """

    def __init__(
        self, artefact: Artefact, encoder: Encoder, history: HistoryPredictor, cache_size: int = 1024
    ) -> None:
        metadata = artefact.metadata
        try:
            self.version = int(metadata["version"])
            trained_with, dim = metadata["encoder"], int(metadata["dim"])
            self._source = str(metadata["model"])
            self._full_shape = FeatureShape(dim, int(metadata["d_user"]), int(metadata["d_app"]))
            self._full = unpack(artefact.arrays, self._source, FULL)
            self._length = unpack(artefact.arrays, self._source, LENGTH)
        except (KeyError, TypeError, ValueError) as error:
            raise ArtefactError(f"the artefact lacks {error}; train it anew") from error
        if (encoder.name, encoder.dim) != (trained_with, dim):
            found = f"{encoder.name} ({encoder.dim} dimensions)"
            raise InvalidValueError("encoder", found, f"{trained_with} ({dim} dimensions), as in training")
        self._length_shape = FeatureShape(dim, 0, self._full_shape.d_app)
        self._cache = EmbeddingCache(encoder, cache_size)
        self._history = history

    def forecast(self, questions: Sequence[ForecastQuestion], effort: Effort = Effort.FULL) -> list[Forecast]:
        """One forecast a question, in their order, never beyond its ``max_new_tokens``.

        ``Effort.LENGTH`` reads no text: a question whose instruction is not kept gets the history's answer.
        """
        if effort is Effort.FULL:
            return self._full_forecasts(questions)
        answers = self._history.forecast(questions)
        if effort is Effort.LENGTH:
            known = [(n, self._cache.known(each.instruction)) for n, each in enumerate(questions)]
            kept = [(n, vector) for n, vector in known if vector is not None]
            asked = [questions[n] for n, _ in kept]
            for (n, _), answer in zip(kept, self._length_forecasts(asked, [v for _, v in kept]), strict=True):
                answers[n] = answer
        return answers

    def _full_forecasts(self, questions: Sequence[ForecastQuestion]) -> list[Forecast]:
        if not questions:
            return []
        app, user = self._cache.embed([q.instruction for q in questions], [q.user_input for q in questions])
        features = self._full_shape.matrix(_input_lens(questions), user, app)
        return self._forecasts(questions, self._full.distribution(features, QUANTILES), self._source)

    def _length_forecasts(self, questions: Sequence[ForecastQuestion], app: Sequence[Floats]) -> list[Forecast]:
        if not questions:
            return []
        features = self._length_shape.matrix(_input_lens(questions), None, np.stack(app))
        return self._forecasts(questions, self._length.distribution(features, QUANTILES), f"{self._source}-length")

    def _forecasts(self, questions: Sequence[ForecastQuestion], found: Distribution, source: str) -> list[Forecast]:
        limits = np.array([each.max_new_tokens for each in questions], np.float64)
        means = np.minimum(found.mean, limits).tolist()
        quantiles = np.minimum(found.quantiles, limits[:, None]).tolist()
        ranks, counts = found.rank.tolist(), found.num_samples.tolist()
        return [
            Forecast(mean, tuple(row), count, source, self.version, rank)
            for mean, row, count, rank in zip(means, quantiles, counts, ranks, strict=True)
        ]


def _input_lens(questions: Sequence[ForecastQuestion]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array([each.user_input_len for each in questions], np.int64)
