"""Forecasts that a server learns from its own requests: by clients, by words, and by the model's hidden states.

Part of ``python -m benchmarks.forecasts``. Natural lengths are recorded by ``python -m benchmarks.natural_lengths``.
"""

from __future__ import annotations

import base64
import gzip
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.decisions.row import Row
from farsight.core.forecast import QUANTILES, CallForm, Forecast, ForecastQuestion, StateQuestion
from farsight.policies.lengths.law import crps, forecast_points
from farsight.predictor.applications.reading import SECRET_BYTES
from farsight.predictor.applications.start import GROWTH, MAX_EXAMPLES, untrained
from farsight.predictor.artefact import from_bytes
from farsight.predictor.history import HistoryPredictor
from farsight.predictor.metrics import coverage_of, kendall_tau
from farsight.predictor.retraining import Sample, retrain, retraining
from farsight.predictor.states import StateRegression
from farsight.predictor.text_predictor import TextPredictor

FIRST_FIT = 100
"""Finished requests before a server's first fit."""

ORDERS = 8
"""Orders of the recorded requests: each begins at another place."""

NUM_PAIRS = 200_000

_BATCH = 8
"""Questions that are answered together, as on a busy server."""


@dataclass(frozen=True)
class Ended:
    """A request that ended: its state is empty where none was recorded."""

    question: ForecastQuestion
    output_len: int
    state: bytes = b""


def fitted(seen: Sequence[Ended]) -> TextPredictor:
    """Fits the predictor of a server that has seen these requests; the last outputs alone before the first fit."""
    history = HistoryPredictor()
    history.learn([each.output_len for each in seen])
    artefact = untrained("benchmark", bytes(SECRET_BYTES))
    if len(seen) >= FIRST_FIT:
        newest = seen[-MAX_EXAMPLES:]
        rows = TextPredictor(artefact, None, history).forecast_with_features([each.question for each in newest])[1]
        samples = [Sample(row, each.output_len) for row, each in zip(rows, newest, strict=True) if row is not None]
        artefact = from_bytes(retrain(retraining(artefact, samples)))
    return TextPredictor(artefact, None, history)


def ordered_pairs(scores: Sequence[float], lens: Sequence[int]) -> float:
    """Returns the share of random pairs of different lengths that scores order rightly; equal scores count half."""
    first, second = np.random.default_rng(0).integers(len(lens), size=(2, NUM_PAIRS))
    sides = np.sign(np.array(lens)[first] - np.array(lens)[second])
    told = np.sign(np.array(scores)[first] - np.array(scores)[second])
    differ = sides != 0
    return float((1 + told * sides)[differ].mean() / 2)


def clients(file: Path, least: float, num_blocks: int = 4) -> Iterator[Row]:
    """Forecasts a trace whose clients are visible and whose texts are not, each block by what ended before it."""
    seen = read_clients(file)
    size = len(seen) // (num_blocks + 1)
    shares, each_ms = [], 0.0
    for begin in range(size, num_blocks * size + 1, size):
        predictor = fitted(seen[:begin])
        made, each_ms = forecasts(predictor, seen[begin : begin + size])
        ranks = [each.mean if each.rank is None else each.rank for each in made]
        shares.append(ordered_pairs(ranks, [each.output_len for each in seen[begin : begin + size]]))
    name = file.name.removesuffix(".csv.gz")
    yield Row(f"{name}: pairs in order", float(np.mean(shares)), least, "share", higher_is_better=True)
    yield Row(f"{name}: processor time of a forecast", each_ms, 0.2, "ms")


def natural(file: Path, least: dict[int, tuple[float, float]]) -> Iterator[Row]:
    """Scores forecasts of recorded requests with natural ends.

    Args:
        least: By number of requests learned from: the least tau without and with hidden states.
    """
    ended = read_natural(file)
    for num, (by_text, by_state) in least.items():
        if num > len(ended) * 0.8:
            continue
        scores: dict[str, list[Scored]] = {}
        for order in range(ORDERS):
            turn = order * len(ended) // ORDERS
            for name, found in _learned(ended[turn:] + ended[:turn], num).items():
                scores.setdefault(name, []).append(found)
        for name, least_tau in (("text", by_text), ("states", by_state)):
            if name in scores:
                yield from _rows(f"natural lengths, {name} after {num}", scores[name], least_tau)


@dataclass(frozen=True)
class Scored:
    """Scores of forecasts of held-back requests.

    Attributes:
        crps: Over that of the law of the lengths learned from.
    """

    tau: float
    crps: float
    p50: float
    p90: float
    each_ms: float


def _rows(where: str, found: Sequence[Scored], least_tau: float) -> Iterator[Row]:
    tau, ratio, p50, p90, each_ms = np.mean([tuple(vars(each).values()) for each in found], axis=0).tolist()
    yield Row(f"{where}: tau", tau, least_tau, "tau", higher_is_better=True)
    yield Row(f"{where}: CRPS over that of the marginal law", ratio, 0.72, "ratio")
    yield Row(f"{where}: coverage of p50 off by", abs(p50 - 0.5), 0.03, "share")
    yield Row(f"{where}: coverage of p90 off by", abs(p90 - 0.9), 0.03, "share")
    yield Row(f"{where}: processor time", each_ms, 0.2, "ms")


def _learned(ended: Sequence[Ended], num: int) -> dict[str, Scored]:
    """Learns from the first requests as a server does, and scores the forecasts of all others."""
    test = ended[num:]
    regression = StateRegression(len(ended[0].state) // 2) if all(each.state for each in ended) else None
    predictor, next_fit = fitted(()), FIRST_FIT
    for begin in range(0, num, _BATCH):
        if begin >= next_fit:
            predictor, next_fit = fitted(ended[:begin]), int(begin * (1 + GROWTH))
        batch = ended[begin : min(begin + _BATCH, num)]
        if regression is not None:
            before = predictor.forecast([each.question for each in batch])
            asked = [_prefilled(each, made) for each, made in zip(batch, before, strict=True)]
            regression.learn([(each, done.output_len) for each, done in zip(asked, batch, strict=True)])
    made, each_ms = forecasts(fitted(ended[:num]), test)
    history = HistoryPredictor()
    history.learn([each.output_len for each in ended[:num]])
    marginal = forecast_points(history.current())
    found = {"text": _scored(made, test, marginal, each_ms)}
    if regression is not None:
        asked = [_prefilled(each, before) for each, before in zip(test, made, strict=True)]
        began = time.process_time()
        by_state = [
            each for at in range(0, len(asked), _BATCH) for each in regression.forecast(asked[at : at + _BATCH])
        ]
        each_ms = (time.process_time() - began) / len(asked) * 1e3
        found["states"] = _scored(by_state, test, marginal, each_ms)
    return found


def _prefilled(ended: Ended, before: Forecast) -> StateQuestion:
    question = ended.question
    return StateQuestion(question.request_id, question.prompt_len, question.max_new_tokens, before, ended.state)


def read_clients(file: Path) -> list[Ended]:
    """Reads a trace whose clients are visible and whose texts are not, in the order of its arrivals."""
    with gzip.open(file, "rt") as lines:
        next(lines)
        fields = [line.split(",") for line in lines]
    return [
        Ended(ForecastQuestion(str(i), "", "", int(row[2]), int(row[2]), 1 << 20, call=CallForm(row[1])), int(row[3]))
        for i, row in enumerate(fields)
    ]


def forecasts(predictor: TextPredictor, asked: Sequence[Ended]) -> tuple[list[Forecast], float]:
    """Returns the forecasts, and the milliseconds of processor time of each."""
    began = time.process_time()
    made: list[Forecast] = []
    for at in range(0, len(asked), _BATCH):
        made += predictor.forecast([each.question for each in asked[at : at + _BATCH]])
    return made, (time.process_time() - began) / len(made) * 1e3


def _scored(made: Sequence[Forecast], test: Sequence[Ended], marginal: NDArray[np.float64], each_ms: float) -> Scored:
    lens = np.array([each.output_len for each in test], np.float64)
    own = np.mean([crps(forecast_points(each), length) for each, length in zip(made, lens, strict=True)])
    usual = np.mean([crps(marginal, length) for length in lens])
    quantiles = np.array([each.quantiles for each in made])
    p50, p90 = (coverage_of(quantiles[:, QUANTILES.index(level)], lens) for level in (0.5, 0.9))
    ranks = [each.mean if each.rank is None else each.rank for each in made]
    return Scored(kendall_tau(ranks, lens), float(own / usual), p50, p90, each_ms)


def read_natural(file: Path) -> list[Ended]:
    """Reads what ``benchmarks.natural_lengths`` has written, in the order of the prompts."""
    rows = sorted((json.loads(line) for line in file.open(encoding="utf-8")), key=lambda row: int(row["number"]))
    found = []
    for row in rows:
        length, limit = int(row["prompt_tokens"]), int(row["limit"])
        question = ForecastQuestion(str(row["number"]), "", row["prompt"], length, length, limit)
        found.append(Ended(question, int(row["output_tokens"]), base64.b64decode(row.get("state", ""))))
    return found
