"""Accuracy of the bins of output lengths, as Multi-Bin's Table 1: ``python -m benchmarks.length_bins [--data DIR]``.

A fine-tuned encoder (from nothing, and from MiniLM), the frozen one with a linear layer, and hashed words, each trained
on the same requests and asked about others. The bins hold equally many of the lengths of those others.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from core.forecast import QUANTILES, Example
from engine.encoders.finding import encoder_dir
from engine.encoders.fine_tuning import FineTuning, fine_tune
from engine.encoders.loading import text_model_of
from engine.encoders.text_encoder import TextEncoder
from predictor.artefact import TrainedModel
from predictor.encoders import MINILM
from predictor.history import HistoryPredictor
from predictor.metrics import bin_accuracy
from predictor.text_predictor import TextPredictor
from predictor.training import RECIPES, train
from services.commands.forecast_data import EMBEDDED_TOKENIZER, TokenCounter, read_examples

PAPER = {2: (0.8614, 1.0), 4: (0.6297, 0.9591), 8: (0.4229, 0.7942)}
"""By number of bins: Table 1, and the shares within one bin that the text gives."""

Training = Callable[[Sequence[Example]], TrainedModel]


def _trainings(epochs: int, max_tokens: int) -> dict[str, Training]:
    options = FineTuning(epochs, max_tokens)
    return {
        "words": lambda seen: train(seen, None, RECIPES["words"]),
        "linear, MiniLM frozen": lambda seen: train(seen, TextEncoder(MINILM), RECIPES["linear"]),
        "bert, from nothing": lambda seen: fine_tune(seen, None, options),
        "bert, from MiniLM": lambda seen: fine_tune(seen, encoder_dir(MINILM), options),
    }


def medians(artefact: TrainedModel, asked: Sequence[Example]) -> list[float]:
    """The median of each forecast."""
    predictor = TextPredictor(artefact, text_model_of(artefact), HistoryPredictor())
    forecasts = predictor.forecast([each.question for each in asked])
    return [each.quantiles[QUANTILES.index(0.5)] for each in forecasts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("FARSIGHT_DATA", "data")))
    parser.add_argument("--train", type=int, default=4000, help="requests to train on")
    parser.add_argument("--test", type=int, default=2000, help="requests to ask about")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens that a fine-tuned encoder reads")
    parser.add_argument("--only", default="", help="kinds whose names contain this")
    args = parser.parse_args()
    print(f"{'data':10} {'kind':22} {'CPU s':>6}  " + "  ".join(f"{k} bins: exact, within 1" for k in PAPER))
    shown = "  ".join(f"{exact:15.3f}, {near:8.3f}" for exact, near in PAPER.values())
    print(f"{'LMSYS':10} {'Multi-Bin, BERT base':22} {'':6}  {shown}")
    for name in ("apps_text", "alpaca"):
        found = read_examples(args.data / f"{name}.jsonl.gz", TokenCounter(EMBEDDED_TOKENIZER)).examples
        drawn = [found[i] for i in np.random.default_rng(0).permutation(len(found))]
        asked, seen = drawn[: args.test], drawn[args.test : args.test + args.train]
        lens = [each.output_len for each in asked]
        for kind, training in _trainings(args.epochs, args.max_tokens).items():
            if args.only not in kind:
                continue
            began = time.process_time()
            estimates = medians(training(seen), asked)
            cells = [bin_accuracy(estimates, lens, k) for k in PAPER]
            shown = "  ".join(f"{exact:15.3f}, {near:8.3f}" for exact, near in cells)
            print(f"{name:10} {kind:22} {time.process_time() - began:6.0f}  {shown}", flush=True)


if __name__ == "__main__":
    main()
