"""Chats with the lengths that a real model gave them, half of them streamed, for the simulator and for servers.

A file of chats has JSON lines with ``prompt``, ``prompt_tokens`` and ``output_tokens``: what a model answered to real
prompts until it ended by itself or reached the limit. ``record`` writes one from any OpenAI-compatible server.
Forecasts are those of ``farsight train --kind words``, each learned from the other folds. A trace of clients without
texts (``.csv.gz``) is forecast by what a server had learned of these clients before.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.learned_forecasts import fitted, forecasts, read_clients
from farsight.core.forecast import Example, Forecast, ForecastQuestion
from farsight.predictor.history import HistoryPredictor
from farsight.predictor.text_predictor import TextPredictor
from farsight.predictor.training import RECIPES, train
from farsight.services.bench.answers import Answer
from farsight.services.bench.datasets import chat_requests
from farsight.services.bench.load import Connection, measure
from farsight.services.bench.requests import BenchRequest
from farsight.services.bench.statistics import Metrics, distribution, error_kinds, run_metrics
from farsight.services.bench.targets import BenchTarget, BodyForm, Call, make_call
from farsight.services.bench.workloads import drawn_arrivals
from farsight.simulator.traffic.workload import SimRequest

LIMIT = 256
"""``max_tokens`` of every chat."""

TEMPERATURE = 0.7
IN_FLIGHT = 16
"""Chats in flight while a file of them is written, and while a server learns from the first."""

READING_RATE = 12.0
"""Tokens a second that the reader of a stream takes in."""

STREAMED = 0.5
"""Share of the chats that are streamed."""

FOLDS = 5

LONGEST, LONGEST_PROMPT = 1024, 4096
"""``max_tokens`` of the requests of a trace, which does not tell it; and the longest prompt that is not left out."""

SEEN, TRACED = 4000, 2000
"""Requests of a trace that have ended, and those after them that are drawn from."""

BURST = 60
"""Chats that come at one instant, in the middle of ``chats-burst``."""

GAPS = {"chats": 1.0, "chats-cv3": 3.0, "chats-burst": 1.0}
"""Workloads of chats, and the coefficient of variation of the gaps between their arrivals."""


@dataclass(frozen=True, slots=True)
class Chat:
    """One prompt and what is known of its answer.

    Attributes:
        limit: ``max_tokens``.
        forecast: By a predictor that has not seen the answer.
    """

    prompt: str
    prompt_len: int
    output_len: int
    limit: int = LIMIT
    forecast: Forecast | None = None


def read_chats(path: Path, folds: int = FOLDS) -> list[Chat]:
    """Returns the chats of a file; ``folds`` 0 gives no forecasts."""
    if path.suffix == ".gz":
        return _traced(path)
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
    chats = [Chat(row["prompt"], row["prompt_tokens"], min(row["output_tokens"], LIMIT)) for row in rows]
    return _with_forecasts(chats, folds) if folds else chats


def _traced(path: Path) -> list[Chat]:
    seen = read_clients(path)[: SEEN + TRACED]
    made, _ = forecasts(fitted(seen[:SEEN]), seen[SEEN:])
    return [
        Chat("", each.question.prompt_len, max(1, min(each.output_len, LONGEST)), LONGEST, forecast)
        for each, forecast in zip(seen[SEEN:], made, strict=True)
        if each.question.prompt_len <= LONGEST_PROMPT
    ]


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


@dataclass(frozen=True, slots=True)
class Drawn:
    """A chat that comes.

    Attributes:
        is_read: Whether it is streamed, and read as it comes.
    """

    at: float
    chat: Chat
    is_read: bool


def draw(chats: Sequence[Chat], num: int, rate: float, workload: str, seed: int) -> list[Drawn]:
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
    return [Drawn(at, rng.choice(chats), rng.random() < STREAMED) for at in times]


def simulated(drawn: Sequence[Drawn]) -> list[SimRequest]:
    """Returns the chats as traffic of the simulator."""
    return [
        SimRequest(
            f"r{number}",
            each.at,
            each.chat.prompt_len,
            each.chat.output_len,
            each.chat.limit,
            forecast=each.chat.forecast,
            reading_rate=READING_RATE if each.is_read else None,
        )
        for number, each in enumerate(drawn)
    ]


def serve(target: BenchTarget, drawn: Sequence[Drawn], in_flight: int = 0) -> Metrics:
    """Sends the chats to a server when they are due, and measures what their clients see.

    Args:
        in_flight: Chats in flight, whenever they are due; 0 for their own times.

    Raises:
        RuntimeError: A request failed.
    """
    form = BodyForm("chat", temperature=TEMPERATURE, ignore_eos=False)
    requests = [BenchRequest(number, LIMIT, text=each.chat.prompt) for number, each in enumerate(drawn)]
    calls = [make_call(each, target.model, form, 0) for each in requests]
    calls = [call if each.is_read else _as_a_whole(call) for call, each in zip(calls, drawn, strict=True)]
    result = measure(target, calls, Connection(form), in_flight or [each.at for each in drawn])
    if failed := error_kinds(result.answers):
        raise RuntimeError(f"{target.label}: {failed}")
    read = [answer for answer in result.answers if drawn[answer.id].is_read]
    unread_s = [answer.jct_s for answer in result.answers if not drawn[answer.id].is_read]
    return run_metrics(result) | seen(unread_s, [each.ttft_s for each in read], [_late_s(each) for each in read])


def _as_a_whole(call: Call) -> Call:
    body = json.loads(call.body) | {"stream": False}
    del body["stream_options"]
    return replace(call, body=json.dumps(body).encode())


def _late_s(answer: Answer) -> float:
    """Returns the seconds that the reader of an answer has waited for tokens, from the first one on."""
    read_s = answer.tokens_per_gap / READING_RATE
    return max(at - answer.chunks_at[0] - number * read_s for number, at in enumerate(answer.chunks_at))


def seen(unread_s: Sequence[float], first_s: Sequence[float], late_s: Sequence[float]) -> Metrics:
    """Returns what clients see, from seconds: ends of who does not read, first tokens and waits of readers."""
    metrics: Metrics = {}
    for name, values in (("unread_jct_ms", unread_s), ("read_ttft_ms", first_s), ("read_late_ms", late_s)):
        metrics |= distribution(name, [1000 * each for each in values])
    return metrics


def record(url: str, model: str, prompts: Path, num: int, seed: int, out: Path) -> None:
    """Asks a server for the answers of ``num`` chats, and writes the file of them.

    Args:
        prompts: Texts or chats, as for ``farsight bench``.

    Raises:
        RuntimeError: A request failed.
    """
    requests = chat_requests(prompts, num, seed, LIMIT)
    form = BodyForm("chat", temperature=TEMPERATURE, ignore_eos=False)
    calls = [make_call(each, model, form, 0) for each in requests]
    answers = measure(BenchTarget("server", url, model), calls, Connection(form), IN_FLIGHT).answers
    if failed := error_kinds(answers):
        raise RuntimeError(f"{url}: {failed}")
    by_id = {each.id: each for each in answers}
    rows = []
    for request in requests:
        answer = by_id[request.id]
        row = {"prompt": request.text, "prompt_tokens": answer.prompt_tokens, "output_tokens": answer.num_tokens}
        rows.append(json.dumps(row, ensure_ascii=False))
    out.write_text("\n".join([*rows, ""]), "utf-8")
