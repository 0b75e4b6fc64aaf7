"""How fast the forecaster by application learns: ``python -m benchmarks.forecaster_from_nothing [--data DIR]``.

Requests of the eight tasks come in random order to an empty forecaster, which trains as a server's does. Each is
forecast before its length is known. Beside it: the plain history, and an artefact (``words``) of 2,000 other requests.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from core.config.scheduling import BatchConfig, SchedulerConfig
from core.forecast import Example, Forecast
from predictor.applications.reading import SECRET_BYTES, raw_features
from predictor.applications.start import GROWTH, MAX_EXAMPLES, untrained
from predictor.artefact import TrainedModel, from_bytes
from predictor.history import HistoryPredictor
from predictor.learning import ContinuousLearning, PredictionOutcome
from predictor.metrics import score as scores_of
from predictor.retraining import Sample, retrain, retraining, score
from predictor.text_predictor import TextPredictor
from predictor.training import RECIPES, train
from services.commands.forecast_data import EMBEDDED_TOKENIZER, TokenCounter, read_examples
from simulator.cluster.records import Record
from simulator.experiment import Experiment
from simulator.run import run as simulate
from simulator.traffic.arrivals import Poisson
from simulator.traffic.workload import SimRequest
from simulator.traffic.workloads import retime

SECRET = bytes(SECRET_BYTES)
MAX_NEW_TOKENS = 1024
CHECKPOINTS = (100, 300, 1000, 2000, 3000)
NUM_TRAINED_ON = 2000
SERVED_FROM = 1000
MAX_NUM_SEQS = 64
THRESHOLDS = (50_000.0, 200_000.0, 1_000_000.0)


def read(data: Path, seed: int) -> list[Example]:
    """The requests within Magnus's limits, in random order."""
    found = read_examples(data / "apps_text.jsonl.gz", TokenCounter(EMBEDDED_TOKENIZER)).examples
    kept = [each for each in found if max(each.output_len, each.question.user_input_len) < MAX_NEW_TOKENS]
    order = np.random.default_rng(seed).permutation(len(kept))
    return [
        replace(kept[i], question=replace(kept[i].question, request_id=str(i), max_new_tokens=MAX_NEW_TOKENS))
        for i in order
    ]


def prequential(examples: Sequence[Example], batch: int = 10) -> list[Forecast]:
    """Forecasts, each made before its own length and those of later requests were known."""
    history, first, forecasts = HistoryPredictor(), untrained("benchmark", SECRET), []
    learning: ContinuousLearning[Sample, TrainedModel] = ContinuousLearning(
        score, first, growth=GROWTH, max_examples=MAX_EXAMPLES
    )
    predictor = TextPredictor(first, None, history)
    for begin in range(0, len(examples), batch):
        now = examples[begin : begin + batch]
        questions = [each.question for each in now]
        forecasts += predictor.forecast(questions)
        history.learn([each.output_len for each in now])
        rows = zip(raw_features(questions, SECRET), now, strict=True)
        learning.observe(PredictionOutcome(Sample(row, each.output_len), None, each.output_len) for row, each in rows)
        current = learning.current
        assert current is not None
        verdict = learning.learn(0.0, partial(_fit, current))
        if verdict is not None and verdict.accepted and learning.current is not None:
            predictor = TextPredictor(learning.current, None, history)
    return forecasts


def _fit(current: TrainedModel, train_set: list[Sample]) -> TrainedModel:
    return from_bytes(retrain(retraining(current, train_set)))


def by_history(examples: Sequence[Example]) -> list[Forecast]:
    history, forecasts = HistoryPredictor(), []
    for each in examples:
        forecasts += history.forecast([each.question])
        history.learn([each.output_len])
    return forecasts


def by_artefact(examples: Sequence[Example], trained_on: Sequence[Example], kind: str = "words") -> list[Forecast]:
    """Forecasts of an artefact that ``farsight train`` would have made."""
    predictor = TextPredictor(train(trained_on, None, RECIPES[kind]), None, HistoryPredictor())
    return predictor.forecast([each.question for each in examples])


def served(
    preset: str,
    examples: Sequence[Example],
    forecasts: Sequence[Forecast | None],
    load: float,
    threshold: float = THRESHOLDS[0],
) -> list[Record]:
    """The simulator's records of these requests.

    Args:
        load: Arrivals are Poisson at this multiple of what ``fcfs`` gets through; inf: all come at once.
        threshold: Phi of Magnus.
    """
    drawn = [
        SimRequest(
            str(i),
            0.0,
            max(each.question.prompt_len, 1),
            max(each.output_len, 1),
            each.question.max_new_tokens,
            forecast=forecast,
        )
        for i, (each, forecast) in enumerate(zip(examples, forecasts, strict=True))
    ]
    if load < math.inf:
        rate = load * throughput(served("fcfs", examples, [None] * len(examples), math.inf))
        drawn = retime(drawn, Poisson(rate).sample(np.random.default_rng(len(drawn)), len(drawn)).tolist())
    batch = BatchConfig(num_bins=4, max_wait_s=1.0, wma_threshold=threshold)
    experiment = Experiment(
        scheduler=SchedulerConfig(preset=preset, execution="static"), max_num_seqs=MAX_NUM_SEQS, batch=batch
    )
    return simulate(experiment, drawn).recorder.done


def throughput(records: Sequence[Record]) -> float:
    """Requests per second until the last has ended."""
    return len(records) / max(each.finished_at for each in records)


def show_served(seed: int, examples: Sequence[Example], made: Mapping[str, Sequence[Forecast]]) -> None:
    """What the presets make of the forecasts of the requests after the first thousand."""
    later = examples[SERVED_FROM:]
    none: list[Forecast | None] = [None] * len(later)
    laws: dict[str, Sequence[Forecast | None]] = {name: made[name][SERVED_FROM:] for name in made}
    cells = [("magnus", threshold) for threshold in THRESHOLDS] + [("multi-bin", THRESHOLDS[0])]
    for preset, threshold in cells:
        rates = {
            name: throughput(served(preset, later, forecasts, math.inf, threshold))
            for name, forecasts in (laws | {"no forecast": none}).items()
        }
        shown = {name: f"{rate:.2f} ({rate / rates['trained']:.3f})" for name, rate in rates.items()}
        print(f"{seed:4} {preset}, Phi {threshold:,.0f}: requests/s", shown)
    for load in (0.9, 1.1):
        waits = {
            name: np.mean([each.jct_s for each in served("farsight-mean", later, forecasts, load)])
            for name, forecasts in (laws | {"no forecast": none}).items()
        }
        base = waits["no forecast"]
        print(f"{seed:4} farsight at {load}: mean JCT", {k: f"{v:.2f} s ({v / base:.3f})" for k, v in waits.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("FARSIGHT_DATA", "data")))
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    print(f"{'seed':>4} {'requests':>12} {'forecasts':12} {'rmse':>7} {'tau':>6} {'pinball':>8} {'0.9 covers':>10}")
    for seed in range(args.seeds):
        drawn = read(args.data, seed)
        examples, others = drawn[: CHECKPOINTS[-1]], drawn[CHECKPOINTS[-1] : CHECKPOINTS[-1] + NUM_TRAINED_ON]
        made = {
            "from nothing": prequential(examples),
            "history": by_history(examples),
            "trained": by_artefact(examples, others),
        }
        for begin, end in zip((0, *CHECKPOINTS), CHECKPOINTS, strict=False):
            for name, forecasts in made.items():
                found = scores_of(forecasts[begin:end], [each.output_len for each in examples[begin:end]])
                covers = found.coverage["0.9"]
                cells = f"{found.rmse:7.1f} {found.tau:6.3f} {found.pinball:8.2f} {covers:10.2f}"
                print(f"{seed:4} {f'{begin}-{end}':>12} {name:12} {cells}")
        show_served(seed, examples, made)


if __name__ == "__main__":
    main()
