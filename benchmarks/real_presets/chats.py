"""Chats with the lengths that a real model gave them, half of them streamed, as traffic of the simulator.

A file of chats has JSON lines with ``prompt``, ``prompt_tokens`` and ``output_tokens``: what a model answered to real
prompts until it ended by itself or reached the limit. ``record`` writes one from any OpenAI-compatible server.
Forecasts are those of ``farsight train --kind words``, each learned from the other folds.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from farsight.core.forecast import Example, Forecast, ForecastQuestion
from farsight.predictor.history import HistoryPredictor
from farsight.predictor.text_predictor import TextPredictor
from farsight.predictor.training import RECIPES, train
from farsight.services.bench.datasets import chat_requests
from farsight.services.bench.load import Connection, measure
from farsight.services.bench.targets import BenchTarget, BodyForm, make_call
from farsight.services.bench.workloads import drawn_arrivals
from farsight.simulator.traffic.workload import SimRequest

LIMIT = 256
"""``max_tokens`` of every chat."""

READING_RATE = 12.0
"""Tokens a second that the reader of a stream takes in."""

STREAMED = 0.5
"""Share of the chats that are streamed."""

FOLDS = 5

BURST = 60
"""Chats that come at one instant, in the middle of ``chats-burst``."""

GAPS = {"chats": 1.0, "chats-cv3": 3.0, "chats-burst": 1.0}
"""Workloads of chats, and the coefficient of variation of the gaps between their arrivals."""


@dataclass(frozen=True, slots=True)
class Chat:
    """One prompt and what is known of its answer.

    Attributes:
        forecast: By a predictor that has not seen the answer.
    """

    prompt: str
    prompt_len: int
    output_len: int
    forecast: Forecast | None = None


def read_chats(path: Path, folds: int = FOLDS) -> list[Chat]:
    """Returns the chats of a file; ``folds`` 0 gives no forecasts."""
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
    chats = [Chat(row["prompt"], row["prompt_tokens"], min(row["output_tokens"], LIMIT)) for row in rows]
    return _with_forecasts(chats, folds) if folds else chats


def _with_forecasts(chats: Sequence[Chat], folds: int) -> list[Chat]:
    questions = [
        ForecastQuestion(str(number), "", chat.prompt, chat.prompt_len, chat.prompt_len, LIMIT)
        for number, chat in enumerate(chats)
    ]
    examples = [Example(question, chat.output_len) for question, chat in zip(questions, chats, strict=True)]
    found = list(chats)
    for fold in range(folds):
        others = [each for number, each in enumerate(examples) if number % folds != fold]
        predictor = TextPredictor(train(others, None, RECIPES["words"]), None, HistoryPredictor())
        places = range(fold, len(chats), folds)
        for place, forecast in zip(places, predictor.forecast([questions[each] for each in places]), strict=True):
            found[place] = replace(chats[place], forecast=forecast)
    return found


def chat_arrivals(chats: Sequence[Chat], num: int, rate: float, workload: str, seed: int) -> list[SimRequest]:
    """Returns ``num`` chats, drawn with replacement, in the order of their arrivals.

    Args:
        rate: Chats a second.
        workload: A name of ``GAPS``.
        seed: The same seed draws the same chats for every system.
    """
    rng = random.Random(seed)
    burst = BURST if workload == "chats-burst" else 0
    times = drawn_arrivals(num - burst, rate, GAPS[workload], seed)
    times = sorted([*times, *[times[len(times) // 2]] * burst])
    return [_arrival(number, rng.choice(chats), at, rng.random() < STREAMED) for number, at in enumerate(times)]


def _arrival(number: int, chat: Chat, at: float, is_read: bool) -> SimRequest:
    return SimRequest(
        f"r{number}",
        at,
        chat.prompt_len,
        chat.output_len,
        LIMIT,
        forecast=chat.forecast,
        reading_rate=READING_RATE if is_read else None,
    )


def record(url: str, model: str, prompts: Path, num: int, seed: int, temperature: float, out: Path) -> None:
    """Asks a server for the answers of ``num`` chats, and writes the file of them.

    Args:
        prompts: Texts or chats, as for ``farsight bench``.

    Raises:
        RuntimeError: A request failed.
    """
    requests = chat_requests(prompts, num, seed, LIMIT)
    form = BodyForm("chat", temperature=temperature, ignore_eos=False)
    calls = [make_call(each, model, form, 0) for each in requests]
    answers = {
        each.id: each for each in measure(BenchTarget("server", url, model), calls, Connection(form), 16).answers
    }
    rows = []
    for request in requests:
        answer = answers[request.id]
        if answer.failure is not None:
            raise RuntimeError(f"request {request.id}: {answer.failure}")
        row = {"prompt": request.text, "prompt_tokens": answer.prompt_tokens, "output_tokens": answer.num_tokens}
        rows.append(json.dumps(row, ensure_ascii=False))
    out.write_text("\n".join([*rows, ""]), "utf-8")
