"""Forecasts from the served model's own hidden state: the state of the last prompt token, in a middle layer.

The state comes out of prefill at no cost. An online ridge regression maps it to the logarithm of the output length,
beside the forecast that was made before prefill. It keeps sums of products and, in memory alone, the latest states.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farsight.core.errors import InvalidValueError
from farsight.core.forecast import QUANTILES, Forecast, StateQuestion
from farsight.predictor.artefact import TrainedModel
from farsight.predictor.features import Floats
from farsight.predictor.metrics import pinball

MAX_DIM = 512
"""Most numbers that are read of a state: a wider one is projected by fixed random directions first."""

SOURCE = "states"

MIN_EXAMPLES = 40
"""Finished requests before the first forecast."""

GROWTH, MOST_NEW = 0.25, 500
"""The weights are solved for again once the examples have grown by this share, or by so many: 30 ms each time."""

HALF_LIFE = 4000.0
"""Examples after which an earlier one counts half."""

RIDGE = 2.0
"""Ridge penalty: examples that the prior of no relation counts for, for each number of a state."""

BESIDE_SHARE = 3.0
"""How much larger than a number of a state the features beside it are: they are few, and each says more."""

RECENT = 500
"""The latest requests whose scores, beside what they turned out as, give the law of a score."""

BANDWIDTH = 0.35
"""Distance of scores at which a request weighs 0.6 in the law of another, in standard deviations of the scores."""

NUM_BESIDE = 2
"""Logarithms of the prompt's length, and of the mean of the forecast before prefill."""


class StateRegression:
    """Learns from each request that ends, and forecasts each that is prefilled.

    Args:
        dim: Width of the model's states.

    Raises:
        InvalidValueError: a width below 1.
    """

    def __init__(self, dim: int) -> None:
        if dim < 1:
            raise InvalidValueError("dim", dim, "an integer >= 1")
        self.dim = dim
        self._directions: Floats | None = None
        if dim > MAX_DIM:
            drawn = np.random.default_rng(0).standard_normal((dim, MAX_DIM), np.float32)
            self._directions = drawn / np.float32(np.sqrt(MAX_DIM))
        width = min(dim, MAX_DIM) + NUM_BESIDE
        self._products = np.zeros((width, width))
        self._sums = np.zeros(width)
        self._with_target = np.zeros(width)
        self._count = self._target_sum = 0.0
        self._num_seen = self._solved_at = 0
        self._weights: NDArray[np.float64] | None = None
        self._kept: deque[tuple[Floats, float]] = deque(maxlen=RECENT)
        self._law = np.empty((0, 2))
        self._losses: deque[tuple[float, float]] = deque(maxlen=RECENT)

    @property
    def num_examples(self) -> int:
        """Finished requests that it has learned from."""
        return self._num_seen

    @property
    def serves(self) -> bool:
        """Whether its pinball loss on the latest requests is below that of the forecasts before prefill.

        Each loss is that of a forecast made before the request was learned from.
        """
        if len(self._losses) < MIN_EXAMPLES:
            return False
        own, before = np.array(self._losses).mean(axis=0)
        return bool(own < before)

    def forecast(self, requests: Sequence[StateQuestion]) -> list[Forecast]:
        """Returns one forecast for each request; the earlier forecast itself until there are ``MIN_EXAMPLES``.

        ``rank`` is None: a score cannot be compared with the ranks of forecasts before prefill. O(requests · width).

        Raises:
            InvalidValueError: a state of another width.
        """
        if self._weights is None or len(self._law) < MIN_EXAMPLES or not requests:
            return [each.before for each in requests]
        return self._forecasts(self._scores(self._rows(requests)), requests)

    def learn(self, ended: Sequence[tuple[StateQuestion, int]]) -> None:
        """Takes requests that ended and their output lengths, oldest first; an output that its limit cut counts too.

        O(requests · width²), and O(width³) where the weights are due.

        Raises:
            InvalidValueError: a state of another width.
        """
        if not ended:
            return
        requests = [request for request, _ in ended]
        lens = np.array([max(length, 1) for _, length in ended], np.float64)
        rows, targets = self._rows(requests), np.log(lens)
        if self._weights is not None and len(self._law) >= MIN_EXAMPLES:
            own = self._forecasts(self._scores(rows), requests)
            self._losses.extend(
                (_loss(made, length), _loss(request.before, length))
                for made, request, length in zip(own, requests, lens, strict=True)
            )
        self._kept.extend(zip(rows.astype(np.float32), lens.tolist(), strict=True))
        ages = np.arange(len(rows))[::-1]
        weights = 0.5 ** (ages / HALF_LIFE)
        kept = 0.5 ** (len(rows) / HALF_LIFE)
        weighted = rows * weights[:, None]
        self._products = kept * self._products + weighted.T @ rows
        self._sums = kept * self._sums + weighted.sum(axis=0)
        self._with_target = kept * self._with_target + weighted.T @ targets
        self._count = kept * self._count + float(weights.sum())
        self._target_sum = kept * self._target_sum + float(weights @ targets)
        self._num_seen += len(rows)
        if self._num_seen >= max(self._solved_at + min(GROWTH * self._solved_at, MOST_NEW), MIN_EXAMPLES):
            self._solve()

    def to_artefact(self, weights_name: str) -> TrainedModel:
        """Returns all that it has learned.

        Args:
            weights_name: Names the served weights: states of other weights mean something else.
        """
        metadata = {
            "model": SOURCE,
            "version": self._num_seen,
            "num_examples": self._num_seen,
            "dim": self.dim,
            "weights": weights_name,
            "solved_at": self._solved_at,
        }
        arrays: Mapping[str, NDArray[Any]] = {
            "products": self._products,
            "sums": self._sums,
            "with_target": self._with_target,
            "totals": np.array([self._count, self._target_sum]),
            "weights": np.empty(0) if self._weights is None else self._weights,
            "law": self._law,
            "losses": np.array(self._losses).reshape(-1, 2),
        }
        return TrainedModel(metadata, arrays)

    @classmethod
    def of_artefact(cls, artefact: TrainedModel, weights_name: str) -> StateRegression | None:
        """Goes on where an artefact ends; None if it belongs to other weights.

        Raises:
            KeyError: An array is missing.
            ValueError: The arrays do not fit together.
        """
        metadata, arrays = artefact.metadata, artefact.arrays
        if metadata["model"] != SOURCE or metadata["weights"] != weights_name:
            return None
        made = cls(int(metadata["dim"]))
        width = len(made._sums)
        if arrays["products"].shape != (width, width) or not all(np.isfinite(each).all() for each in arrays.values()):
            raise ValueError("a regression whose arrays fit together")
        made._products = arrays["products"]
        made._sums, made._with_target = arrays["sums"].reshape(width), arrays["with_target"].reshape(width)
        made._count, made._target_sum = map(float, arrays["totals"])
        made._weights = arrays["weights"].reshape(width + 1) if len(arrays["weights"]) else None
        made._num_seen, made._solved_at = int(metadata["num_examples"]), int(metadata["solved_at"])
        made._law = arrays["law"].reshape(-1, 2)
        made._losses.extend(map(tuple, arrays["losses"].reshape(-1, 2).tolist()))
        return made

    def _rows(self, requests: Sequence[StateQuestion]) -> NDArray[np.float64]:
        """Returns the features, shape (requests, width)."""
        for each in requests:
            if len(each.state) != 2 * self.dim:
                raise InvalidValueError("state", len(each.state), f"{2 * self.dim} bytes: {self.dim} numbers")
        packed = np.frombuffer(b"".join(each.state for each in requests), np.float16)
        states = packed.reshape(-1, self.dim).astype(np.float32)
        if self._directions is not None:
            states = states @ self._directions
        beside = np.log([(max(each.prompt_len, 1), max(each.before.mean, 1.0)) for each in requests])
        return np.concatenate([states, beside], axis=1, dtype=np.float64)

    def _scores(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        assert self._weights is not None
        scores: NDArray[np.float64] = rows @ self._weights[:-1] + self._weights[-1]
        return scores

    def _solve(self) -> None:
        """Solves for the weights of features that are centred and have the same variance."""
        centre, target = self._sums / self._count, self._target_sum / self._count
        covariance = self._products / self._count - np.outer(centre, centre)
        variance = np.diag(covariance)
        unit: NDArray[np.float64] = np.where(variance > 1e-9, 1.0 / np.sqrt(np.maximum(variance, 1e-9)), 0.0)
        unit[-NUM_BESIDE:] *= BESIDE_SHARE
        system = covariance * unit[:, None] * unit
        system[np.diag_indices_from(system)] += RIDGE * len(unit) / self._count
        inverse = np.linalg.inv(system)
        slopes = unit * (inverse @ (unit * (self._with_target / self._count - centre * target)))
        self._weights = np.append(slopes, target - centre @ slopes)
        self._solved_at = self._num_seen
        if len(self._kept) >= MIN_EXAMPLES:
            self._law = self._scores_without_each(centre, unit, inverse)

    def _scores_without_each(
        self, centre: NDArray[np.float64], unit: NDArray[np.float64], inverse: NDArray[np.floating[Any]]
    ) -> NDArray[np.float64]:
        """Returns the kept requests' scores by weights fitted to all others, and their lengths, (requests, 2), rising.

        The score of a request that took part in the fit would be too good. Leaving it out moves its residual by the
        factor 1 / (1 - leverage).
        """
        rows = np.stack([row for row, _ in self._kept]).astype(np.float64)
        lens = np.array([length for _, length in self._kept])
        scaled = (rows - centre) * unit
        leverage = np.minimum((np.einsum("ij,ij->i", scaled @ inverse, scaled) + 1.0) / self._count, 0.95)
        targets = np.log(lens)
        scores = targets - (targets - self._scores(rows)) / (1.0 - leverage)
        law: NDArray[np.float64] = np.stack([scores, lens], axis=1)[np.argsort(lens)]
        return law

    def _forecasts(self, scores: NDArray[np.float64], requests: Sequence[StateQuestion]) -> list[Forecast]:
        """Gives each score the law of the kept requests, of which those with a near score weigh more."""
        known, lens = self._law.T
        distance = (scores[:, None] - known) / (BANDWIDTH * known.std() + 1e-9)
        weights = np.exp(-0.5 * np.square(distance)) + 1e-6  # a score far from all others has the law of all
        weights /= weights.sum(axis=1, keepdims=True)
        places = weights.cumsum(axis=1) - 0.5 * weights
        made = []
        for request, row, place in zip(requests, weights, places, strict=True):
            within = np.minimum(lens, request.max_new_tokens)
            quantiles = tuple(np.interp(QUANTILES, place, within).tolist())
            made.append(Forecast(float(row @ within), quantiles, len(lens), SOURCE, self._num_seen))
        return made


def _loss(forecast: Forecast, length: float) -> float:
    return pinball(np.array([forecast.quantiles]), np.array([length]))
