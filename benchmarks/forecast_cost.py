"""What a forecast costs in processor time, the encoder apart: ``python -m benchmarks.forecast_cost [--json]``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from benchmarks.decisions.row import Row
from core.forecast import Example, ForecastQuestion
from predictor.features import Floats
from predictor.history import HistoryPredictor
from predictor.text_predictor import TextPredictor
from predictor.training import RECIPES, train

_WORDS = ("list", "name", "explain", "write", "why", "rain", "short", "story", "two", "ways", "to", "the", "a", "of")


class _NoEncoder:
    """Vectors from a generator: the time of an encoder is another matter."""

    name = "none"
    dim = 384

    def encode(self, texts: Sequence[str]) -> Floats:
        return np.random.default_rng(len(texts)).normal(size=(len(texts), self.dim)).astype(np.float32)


def rows(num_examples: int = 4000) -> list[Row]:
    """A forecast alone and 64 together, with 100 trees grown on ``num_examples`` requests of 8 applications."""
    rng = np.random.default_rng(0)
    examples = []
    for number in range(num_examples):
        text = " ".join(rng.choice(_WORDS, rng.integers(3, 60)))
        question = ForecastQuestion(str(number), f"task {number % 8}", text, len(text), len(text) + 20, 4096)
        examples.append(Example(question, int(rng.lognormal(4 + (number % 8) / 4, 0.6)) + 1))
    found = []
    for kind in ("magnus", "forest", "words"):
        artefact = train(examples, _NoEncoder(), RECIPES[kind])
        predictor = TextPredictor(artefact, _NoEncoder(), HistoryPredictor())
        batch = [each.question for each in examples[:64]]
        predictor.forecast(batch)  # instructions are kept from here on
        one, many = (_median_cpu_s(partial(predictor.forecast, asked)) * 1e3 for asked in (batch[:1], batch))
        found.append(Row(f"{kind}: one forecast", one, 3.0, "ms"))
        found.append(Row(f"{kind}: one of 64 together", many / 64, 0.3, "ms"))
    return found


def _median_cpu_s(run: Callable[[], object], repeats: int = 50) -> float:
    """CPU seconds of this process: other work on the machine does not count. numpy uses one thread here."""
    run()
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        run()
        times.append(time.process_time() - begin)
    return sorted(times)[repeats // 2]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forecast_cost", description=__doc__)
    parser.add_argument("--json", action="store_true", help="JSON lines on standard output")
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    measured = rows()
    for row in measured:
        values = row.as_dict()
        print(json.dumps(values) if args.json else f"{row.claim}: {row.measured:.3g} {row.unit} ({row.verdict})")
    sys.exit(any(row.verdict == "off" for row in measured))


if __name__ == "__main__":
    main()
