"""Forecasts of output lengths on real texts: ``python -m benchmarks.forecasts [--json] [--data DIR]``.

Every fifth request, by a hash of its texts, is held out. Lengths are tokens of the embedded model. ``--parts clients``
forecasts traces by their clients, and ``--parts natural --natural FILE`` recorded answers of a real model, as a server
learns it from its own requests (``benchmarks.learned_forecasts``).
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks import learned_forecasts, tuned_encoder
from benchmarks.decisions.row import Row
from farsight.core.forecast import Example, Forecast
from farsight.engine.encoders.loading import load_encoder
from farsight.predictor.encoders import MINILM
from farsight.predictor.features import Floats
from farsight.predictor.history import HistoryPredictor
from farsight.predictor.metrics import Scores, kendall_tau, rmse, score
from farsight.predictor.text_predictor import TextPredictor
from farsight.predictor.trainer import ForestOptions, grow
from farsight.predictor.training import RECIPES, Recipe, embed_all, train
from farsight.services.commands.forecast_data import EMBEDDED_TOKENIZER, TokenCounter, read_examples

LIMIT = 1024
"""Longest prompts and outputs in Magnus's experiments, in tokens (§IV)."""


class Recalled:
    """Vectors that were computed once: by text, kept in a file."""

    def __init__(self, name: str, device: str, examples: Sequence[Example], file: Path) -> None:
        self.name = name
        if not file.exists():
            app, user = embed_all(load_encoder(name, device), examples, _count)
            np.savez(file, app=app, user=user)
        with np.load(file) as kept:
            app, user = kept["app"], kept["user"]
        self.dim = app.shape[1]
        self._vectors = {each.question.instruction: row for each, row in zip(examples, app, strict=True)}
        self._vectors |= {each.question.user_input: row for each, row in zip(examples, user, strict=True)}

    def encode(self, texts: Sequence[str]) -> Floats:
        return np.array([self._vectors[each] for each in texts], np.float32).reshape(-1, self.dim)


@dataclass(frozen=True)
class Split:
    """Requests of a file, apart for training and testing."""

    train: list[Example]
    test: list[Example]
    train_tasks: list[str]
    test_tasks: list[str]

    @property
    def lens(self) -> list[int]:
        return [each.output_len for each in self.test]

    def within(self, limit: int) -> Split:
        """Those whose user inputs and outputs do not exceed a limit."""

        def keep(examples: list[Example], tasks: list[str]) -> tuple[list[Example], list[str]]:
            kept = [n for n, e in enumerate(examples) if max(e.question.user_input_len, e.output_len) <= limit]
            return [examples[n] for n in kept], [tasks[n] for n in kept]

        (train_, train_tasks), (test, test_tasks) = keep(self.train, self.train_tasks), keep(self.test, self.test_tasks)
        return Split(train_, test, train_tasks, test_tasks)


def table_2(split: Split, encoder: Recalled, where: str) -> Iterator[Row]:
    """Magnus's Table II: RMSE of four predictors."""
    lens = np.array(split.lens)
    inputs = np.array([each.question.user_input_len for each in split.test])
    uilo, raft = rmse(inputs, lens), rmse(_raft(split), lens)
    inst = _measure(f"{where}: INST", split, encoder, replace(RECIPES["magnus"], d_user=0)).rmse
    usin = {}
    for d_user, d_app in ((16, 4), (4, 16)):
        recipe = replace(RECIPES["magnus"], d_user=d_user, d_app=d_app)
        usin[d_user] = _measure(f"{where}: USIN {d_user}/{d_app}", split, encoder, recipe)
    yield Row(f"{where}: RMSE of UILO over that of RAFT", uilo / raft, 1.0, "ratio", higher_is_better=True)
    yield Row(f"{where}: RMSE of UILO over that of INST", uilo / inst, 1.0, "ratio", higher_is_better=True)
    yield Row(f"{where}: RMSE of RAFT and INST apart", abs(raft / inst - 1), 0.03, "share")
    yield Row(f"{where}: RMSE of USIN over that of INST", usin[16].rmse / inst, 1.0, "ratio")
    yield Row(f"{where}: RMSE of USIN over that of UILO", usin[16].rmse / uilo, 0.5, "ratio")
    yield Row(f"{where}: RMSE of USIN, user 16 and app 4 over 4 and 16", usin[16].rmse / usin[4].rmse, 1.0, "ratio")
    yield Row(f"{where}: tau of USIN", usin[16].tau, 0.7, "tau", higher_is_better=True)
    _tell(f"{where}: RMSE UILO {uilo:.1f}, RAFT {raft:.1f}, INST {inst:.1f}, USIN {usin[16].rmse:.1f}")
    _tell(f"{where}: tau UILO {kendall_tau(inputs, lens):.3f}, RAFT {kendall_tau(_raft(split), lens):.3f}")


def _raft(split: Split) -> np.ndarray:
    """One forest a task, on the input's length alone."""
    predicted = np.empty(len(split.test))
    for task in sorted(set(split.train_tasks)):
        rows = [each for each, name in zip(split.train, split.train_tasks, strict=True) if name == task]
        places = [n for n, name in enumerate(split.test_tasks) if name == task]
        own = np.array([[each.question.user_input_len] for each in rows], np.float32)
        forest = grow(own, np.array([each.output_len for each in rows]), ForestOptions())
        asked = np.array([[split.test[n].question.user_input_len] for n in places], np.float32)
        predicted[places] = forest.distribution(asked, (0.5,)).mean
    return predicted


def distributions(split: Split, encoder: Recalled, where: str, least_tau: float, recipe: Recipe) -> Iterator[Row]:
    """Order and quantiles of the predictors of ``farsight train``; ``recipe`` is that of the forest on embeddings."""
    for kind, each in (("forest", recipe), ("words", RECIPES["words"])):
        found = _measure(f"{where}: {kind}", split, encoder, each)
        yield Row(f"{where}: tau of {kind}", found.tau, least_tau, "tau", higher_is_better=True)
        for level, covered in found.coverage.items():
            off = abs(covered - float(level))
            yield Row(f"{where}: {kind}, coverage of the {level} quantile off by", off, 0.03, "share")
    _measure(f"{where}: linear", split, encoder, RECIPES["linear"])


def _measure(name: str, split: Split, encoder: Recalled, recipe: Recipe) -> Scores:
    """Trains as ``farsight train`` does and asks as a server would."""
    began = time.process_time()
    artefact = train(split.train, encoder, recipe)
    trained_s = time.process_time() - began
    predictor = TextPredictor(artefact, encoder, HistoryPredictor())
    began = time.process_time()
    forecasts: list[Forecast] = []
    for begin in range(0, len(split.test), 64):
        forecasts += predictor.forecast([each.question for each in split.test[begin : begin + 64]])
    each_ms = (time.process_time() - began) / len(forecasts) * 1e3
    found = score(forecasts, split.lens)
    coverage = "/".join(f"{share:.3f}" for share in found.coverage.values())
    _tell(
        f"{name}: RMSE {found.rmse:.1f}, MAE {found.mae:.1f}, tau {found.tau:.3f}, pinball {found.pinball:.2f}, "
        f"coverage {coverage}, trained in {trained_s:.0f} s, {each_ms:.2f} ms each without the encoder (CPU)"
    )
    return found


def read_split(file: Path) -> Split:
    """Held out: a fifth, by a hash of instruction and user input."""
    found = read_examples(file, TokenCounter(EMBEDDED_TOKENIZER), strict=True)
    examples: tuple[list[Example], list[Example]] = ([], [])
    tasks: tuple[list[str], list[str]] = ([], [])
    for example, task in zip(found.examples, found.tasks, strict=True):
        text = f"{example.question.instruction}\x1f{example.question.user_input}"
        held_out = int(hashlib.sha256(text.encode()).hexdigest(), 16) % 5 == 0
        examples[held_out].append(example)
        tasks[held_out].append(task)
    return Split(*examples, *tasks)


LEAST_PAIRS = {"servegen_m_large": 0.83, "servegen_m_small": 0.83, "servegen_r1": 0.64}
"""Traces, and the least share of pairs that are to be in order."""

LEAST_TAU = {200: (0.38, 0.45), 350: (0.38, 0.45), 1600: (0.43, 0.50)}
"""Least tau after so many requests, without and with hidden states."""


def learned_rows(data: Path, parts: Sequence[str], natural: Path | None) -> Iterator[Row]:
    """Scores what a server learns from its own requests."""
    if "clients" in parts:
        for name, least in LEAST_PAIRS.items():
            yield from learned_forecasts.clients(data / f"{name}.csv.gz", least)
    if "natural" in parts and natural is not None:
        yield from learned_forecasts.natural(natural, LEAST_TAU)
    if "tuned" in parts and natural is not None:
        yield from tuned_encoder.rows(natural, _tell)


def rows(data: Path, cache: Path, encoder: str, device: str) -> Iterator[Row]:
    """All that is trained on texts; minutes, most of them the encoder's."""
    for name, least_tau in (("apps_text", 0.7), ("alpaca", 0.4)):
        split = read_split(data / f"{name}.jsonl.gz")
        file = cache / f"{name}.{encoder.replace('/', '_')}.npz"
        recalled = Recalled(encoder, device, split.train + split.test, file)
        recipe = RECIPES["forest"]
        if name == "apps_text":
            yield from table_2(split, recalled, name)
            yield from table_2(split.within(LIMIT), recalled, f"{name} within {LIMIT}")
        else:
            _measure(f"{name}: magnus", split, recalled, RECIPES["magnus"])
            # Each instruction is another one here: all of its dimensions, a fifth of the features at a split.
            grown = replace(recipe.forest, min_samples_leaf=5, max_features=0.2)
            recipe = replace(recipe, d_app=None, forest=grown)
        yield from distributions(split, recalled, name, least_tau, recipe)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _count(done: int) -> None:
    if done % 2560 == 0:
        _tell(f"{done} texts encoded")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forecasts", description=__doc__)
    parser.add_argument("--json", action="store_true", help="JSON lines on standard output")
    default = Path(os.environ.get("FARSIGHT_DATA", "../shared/data"))
    parser.add_argument("--data", type=Path, default=default, metavar="DIR", help="with apps_text and alpaca")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="keeps what the encoder has computed")
    parser.add_argument("--encoder", default=MINILM, help="as of farsight train (default: minilm)")
    parser.add_argument("--device", default="auto", help="of the encoder")
    parts = ("texts", "clients", "natural", "tuned")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="of the benchmark (default: all)")
    parser.add_argument("--natural", type=Path, metavar="FILE", help="that benchmarks.natural_lengths has written")
    args = parser.parse_args()
    off = False
    with tempfile.TemporaryDirectory() as scratch:
        texts = rows(args.data, args.cache or Path(scratch), args.encoder, args.device) if "texts" in args.parts else ()
        for row in itertools.chain(learned_rows(args.data, args.parts, args.natural), texts):
            off |= row.verdict == "off"
            sign = ">=" if row.higher_is_better else "<="
            text = f"{row.claim}: {row.measured:.3f} {row.unit}, target {sign} {row.target:g} ({row.verdict})"
            print(json.dumps(row.as_dict()) if args.json else text, flush=True)
    sys.exit(off)


if __name__ == "__main__":
    main()
