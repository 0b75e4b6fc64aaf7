"""Forecasts from a request's contents: its input's length and text and its application's instruction."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from farsight.core.errors import InvalidValueError
from farsight.core.forecast import QUANTILES, Forecast, ForecastQuestion
from farsight.predictor.applications.reading import MODEL as APPLICATIONS
from farsight.predictor.applications.reading import SECRET, ApplicationReader
from farsight.predictor.artefact import ArtefactError, TrainedModel
from farsight.predictor.encoders import Encoder, Scorer
from farsight.predictor.features import IMAGES, FeatureShape, Floats
from farsight.predictor.forest import LengthDistributions
from farsight.predictor.history import HistoryPredictor
from farsight.predictor.models import BERT, FULL, LENGTH, Model, unpack
from farsight.predictor.readers import EmbeddingCache, EmbeddingReader, Reader, ScoreReader, WordReader
from farsight.predictor.retraining import is_untrained
from farsight.predictor.shedding import Effort
from farsight.predictor.words import WordScorer

_MAX_CACHED = 1024
"""Instructions whose embeddings are kept."""


class TextPredictor:
    """Serves a trained artefact; the caller of ``forecast`` chooses the effort.

    ``Forecast.source`` names the inputs of a forecast: ``forest`` (or ``linear``, as the artefact is) if the user input
    was read, ``forest-length`` if its length and the instruction were, ``history`` if the request was not read.

    Args:
        artefact: From ``training.train``.
        encoder: The encoder of its training (``encoder_of``), or its regressor; None if it needs none.
        history: Answers where the artefact costs too much; this object does not train it.

    Raises:
        ArtefactError: The artefact lacks an entry.
        InvalidValueError: Field ``encoder``: it is not the encoder of the training.
    """

    def __init__(self, artefact: TrainedModel, encoder: Encoder | Scorer | None, history: HistoryPredictor) -> None:
        try:
            self.version = int(artefact.metadata["version"])
            self.encoder = encoder
            self._source = str(artefact.metadata["model"])
            self._reader = _reader(artefact, encoder)
            reads_all = not isinstance(self._reader, EmbeddingReader)
            self._full = self._length = None
            if not is_untrained(artefact):
                self._full = unpack(artefact.arrays, self._source, FULL)
                self._length = self._full if reads_all else unpack(artefact.arrays, self._source, LENGTH)
            self._length_source = self._source if reads_all else f"{self._source}-length"
        except (KeyError, TypeError, ValueError) as error:
            raise ArtefactError(f"the artefact lacks {error}; train it again") from error
        self._history = history

    def forecast(self, questions: Sequence[ForecastQuestion], effort: Effort = Effort.FULL) -> list[Forecast]:
        """Returns one forecast for each question, in their order, of 1 to ``max_new_tokens`` tokens.

        ``Effort.LENGTH`` encodes nothing: a question whose instruction is not kept gets the history's answer.
        """
        return self.forecast_with_features(questions, effort)[0]

    def forecast_with_features(
        self, questions: Sequence[ForecastQuestion], effort: Effort = Effort.FULL
    ) -> tuple[list[Forecast], list[Floats | None]]:
        """Returns ``forecast``, and the features of each question, shape (features,); None without ``Effort.FULL``."""
        if not questions:
            return [], []
        if effort is Effort.FULL:
            features = self._reader.full(questions)
            return self._answers(self._full, features, questions), list(features)
        return self._forecast_cheaply(questions, effort), [None] * len(questions)

    def _forecast_cheaply(self, questions: Sequence[ForecastQuestion], effort: Effort) -> list[Forecast]:
        answers = self._history.forecast(questions)
        if effort is Effort.LENGTH and self._length is not None:
            read, features = self._reader.length(questions)
            if read:
                found = self._length.distribution(features, QUANTILES)
                asked = [questions[number] for number in read]
                for number, answer in zip(read, self._forecasts(asked, found, self._length_source), strict=True):
                    answers[number] = answer
        return answers

    def _answers(self, model: Model | None, features: Floats, questions: Sequence[ForecastQuestion]) -> list[Forecast]:
        if model is None:
            return self._history.forecast(questions)
        return self._forecasts(questions, model.distribution(features, QUANTILES), self._source)

    def _forecasts(
        self, questions: Sequence[ForecastQuestion], found: LengthDistributions, source: str
    ) -> list[Forecast]:
        limits = np.array([each.max_new_tokens for each in questions], np.float64)
        means = np.clip(found.mean, 1.0, limits).tolist()
        quantiles = np.clip(found.quantiles, 1.0, limits[:, None]).tolist()
        ranks, counts = found.rank.tolist(), found.num_samples.tolist()
        return [
            Forecast(mean, tuple(row), count, source, self.version, rank)
            for mean, row, count, rank in zip(means, quantiles, counts, ranks, strict=True)
        ]


def encoder_of(artefact: TrainedModel) -> str | None:
    """Returns the name of the encoder that an artefact was trained with; None if it needs none."""
    name = artefact.metadata.get("encoder")
    return None if name is None else str(name)


def _reader(artefact: TrainedModel, encoder: Encoder | Scorer | None) -> Reader:
    metadata = artefact.metadata
    if metadata["model"] == BERT:
        if not isinstance(encoder, Scorer):
            raise InvalidValueError("encoder", encoder, "the artefact's own regressor")
        return ScoreReader(encoder)
    if metadata["model"] == APPLICATIONS:
        return ApplicationReader(artefact.arrays[SECRET].tobytes())
    images = bool(metadata.get(IMAGES, False))
    if encoder_of(artefact) is None:
        return WordReader(WordScorer(artefact.arrays["words"], images))
    trained_with, dim = metadata["encoder"], int(metadata["dim"])
    if not isinstance(encoder, Encoder) or (encoder.name, encoder.dim) != (trained_with, dim):
        found = f"{encoder.name} ({encoder.dim} dimensions)" if isinstance(encoder, Encoder) else None
        raise InvalidValueError("encoder", found, f"{trained_with} ({dim} dimensions), as in training")
    shape = FeatureShape(dim, int(metadata["d_user"]), int(metadata["d_app"]))
    return EmbeddingReader(shape, EmbeddingCache(encoder, _MAX_CACHED), images=images)
