"""An encoder that is trained with its head, beside a frozen one, as Multi-Bin's appendix C.1 trains BERT.

Part of ``python -m benchmarks.forecasts``: prompts and lengths are those of ``benchmarks.natural_lengths``, or of
``benchmarks.real_presets record``. The paper's figures: a bin is right for 86 % of requests with 2 bins, 63 % with 4,
42 % with 8, and 4 bins serve 8 % more, of 45 % if lengths are known; it learned from 120,000 requests.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from benchmarks.decisions.row import Row
from farsight.core.forecast import Example, ForecastQuestion
from farsight.engine.encoders.finding import encoder_dir
from farsight.engine.encoders.loading import load_encoder
from farsight.policies.batching.multi_bin import sample_edges
from farsight.predictor.encoders import MINILM
from farsight.predictor.history import HistoryPredictor
from farsight.predictor.metrics import kendall_tau, rmse
from farsight.predictor.text_predictor import TextPredictor
from farsight.predictor.training import RECIPES, train
from farsight.simulator.traffic.arrivals import AllAtOnce
from lab.reproduce.multi_bin_runs import PHI, serve

EPOCHS = 3
BATCH = 16
MAX_TOKENS = 64
"""What is read of a prompt: most of the instructions are shorter."""

LEARNING_RATE, HEAD_RATE = 5e-5, 1e-2
BINS = (2, 4, 5, 8, 10)
SERVED = 800
"""Requests of a run of Multi-Bin, as in the paper; drawn from those that are held out."""

Floats = NDArray[np.float64]


def read_lengths(file: Path) -> list[Example]:
    """Reads prompts and lengths, in an order that no file gives away."""
    rows = [json.loads(line) for line in file.read_text("utf-8").splitlines() if line.strip()]
    random.Random(0).shuffle(rows)
    found = []
    for number, row in enumerate(rows):
        length, limit = int(row["prompt_tokens"]), int(row.get("limit", 256))
        question = ForecastQuestion(str(number), "", row["prompt"], length, length, limit)
        found.append(Example(question, min(int(row["output_tokens"]), limit)))
    return found


def frozen(known: Sequence[Example], asked: Sequence[Example]) -> Floats:
    """Predicts by the linear head of ``farsight train --kind linear`` over the encoder as it is published."""
    encoder = load_encoder(MINILM)
    predictor = TextPredictor(train(known, encoder, RECIPES["linear"]), encoder, HistoryPredictor())
    made = predictor.forecast([each.question for each in asked])
    return np.array([each.mean if each.rank is None else each.rank for each in made])


def tuned(known: Sequence[Example], asked: Sequence[Example]) -> Floats:
    """Predicts by the same encoder after all of it has learned with a linear head, by the least absolute error."""
    torch.manual_seed(0)
    model = SentenceTransformer(str(encoder_dir(MINILM)), device="cpu")
    model.max_seq_length = MAX_TOKENS
    lens = torch.tensor([each.output_len for each in known], dtype=torch.float32)
    head = torch.nn.Linear(int(model.get_embedding_dimension() or 0), 1)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    centre, scale = lens.median(), lens.std()
    groups = [
        {"params": model.parameters(), "lr": LEARNING_RATE},
        {"params": head.parameters(), "lr": HEAD_RATE},
    ]
    optimiser = torch.optim.AdamW(groups)

    def scored(examples: Sequence[Example]) -> torch.Tensor:
        read = model.preprocess([each.question.user_input for each in examples])
        made: torch.Tensor = head(model(read)["sentence_embedding"])[:, 0]
        return centre + scale * made

    model.train()
    for _ in range(EPOCHS):
        for places in torch.randperm(len(known)).split(BATCH):
            optimiser.zero_grad()
            error = (scored([known[each] for each in places]) - lens[places]).abs().mean() / scale
            error.backward()
            optimiser.step()
    model.eval()
    with torch.no_grad():
        made = [scored(asked[at : at + BATCH]) for at in range(0, len(asked), BATCH)]
    return torch.cat(made).double().numpy()


def rows(file: Path, tell: Callable[[str], None]) -> Iterator[Row]:
    """Learns from four of five requests, and scores the forecasts of the others."""
    examples = read_lengths(file)
    held = len(examples) // 5
    known, asked = examples[held:], examples[:held]
    lens = np.array([each.output_len for each in asked])
    learned = [each.output_len for each in known]
    forecasts = {"frozen": frozen(known, asked), "tuned": tuned(known, asked)}
    for name, made in forecasts.items():
        right = {k: _right(made, lens, learned, k) for k in BINS}
        gains = {k: _gain(made, lens, learned, k) for k in BINS}
        known_gains = {k: _gain(lens, lens, learned, k) for k in BINS}
        shown = ", ".join(
            f"{k} bins {right[k]:.0%} right, {gains[k]:.1f} % more of {known_gains[k]:.1f} %" for k in BINS
        )
        tell(f"{name}: RMSE {rmse(made, lens):.1f}, tau {kendall_tau(made, lens):.3f}; {shown}")
    where = f"natural lengths, {len(known)} learned from, {held} held out"
    errors = {name: rmse(made, lens) for name, made in forecasts.items()}
    yield Row(f"{where}: RMSE of tuned over frozen", errors["tuned"] / errors["frozen"], 1.0, "ratio")
    yield Row(f"{where}: RMSE of tuned over that of the mean", errors["tuned"] / float(np.std(lens)), 1.0, "ratio")


def _binned(values: Floats | NDArray[np.int64], edges: Sequence[float]) -> NDArray[np.int64]:
    return np.searchsorted(edges[1:-1], values, side="right")


def _right(made: Floats, lens: NDArray[np.int64], learned: Sequence[int], num_bins: int) -> float:
    edges = sample_edges(learned, num_bins)
    return float((_binned(made, edges) == _binned(lens, edges)).mean())


def _gain(made: Floats, lens: NDArray[np.int64], learned: Sequence[int], num_bins: int) -> float:
    """Returns the gain of throughput over one bin, in per cent."""
    drawn = np.random.default_rng(0).integers(len(lens), size=SERVED)
    predicted = np.maximum(1, np.rint(made)).astype(np.int64)[drawn]
    few, many = (
        serve(lens[drawn], predicted, sample_edges(learned, k), 8, AllAtOnce(), PHI).throughput for k in (1, num_bins)
    )
    return 100 * (many / few - 1)
