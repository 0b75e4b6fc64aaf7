"""Learning on a live server while the mix of tasks drifts: ``python -m benchmarks.drift [--json] [--data DIR]``.

A predictor is trained on half of the tasks. A server with it gets those tasks, then, from one moment on, the others,
whose outputs end where they did in the data. Afterwards its log says how wrong each forecast was, and how long each
request waited for its first token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np

from actors.log.log_backend import Retention
from actors.log.log_sqlite import SqliteLog
from benchmarks.common.servers import RunningServer, farsight_command
from benchmarks.decisions.row import Row
from core.forecast import Example
from core.messages.log import ArtefactInfo, LoggedExample, LogQuery
from predictor.training import RECIPES, train
from services.commands.forecast_data import EMBEDDED_TOKENIZER, TokenCounter, read_examples

MAX_LEN = 1000
"""Most tokens of prompt and output together: the embedded model's context, less those between instruction and input."""

NUM_TRAINED_ON = 2000
"""Requests of the first half of the tasks that the predictor is trained on."""

FIT_S = 15.0
"""Longest time that the fit of a new version runs before it serves, in seconds."""

WINDOW_S = 60.0


@dataclass(frozen=True)
class Sizes:
    """Seconds before the drift and after it, requests a second, seconds between two fits."""

    before_s: float
    after_s: float
    rate: float
    learn_every_s: float


@dataclass(frozen=True)
class Measured:
    """What the log says; times in seconds since the first request.

    Attributes:
        versions: When each version that was learned began to serve.
    """

    at_s: np.ndarray
    error: np.ndarray
    ttft_s: np.ndarray
    versions: list[float]
    sizes: Sizes

    def rmse(self, begin_s: float, end_s: float) -> float:
        inside = (self.at_s >= begin_s) & (self.at_s < end_s)
        return float(np.sqrt(np.mean(self.error[inside] ** 2)))

    def fitting(self) -> np.ndarray:
        """Which requests came during the fit of a version that was accepted."""
        found: np.ndarray = np.any([(self.at_s > at - FIT_S) & (self.at_s <= at) for at in self.versions], axis=0)
        return found

    def rows(self) -> list[Row]:
        """Errors rise after the drift; after learning they fall again, and no request waits for that."""
        sizes, drift, end = self.sizes, self.sizes.before_s, self.at_s.max()
        before, lost = self.rmse(0, drift), self.rmse(drift, drift + sizes.learn_every_s)
        learned = self.rmse(end - sizes.learn_every_s, end)
        fitting = self.fitting()
        during, otherwise = (np.quantile(self.ttft_s[chosen], (0.5, 0.99)) * 1e3 for chosen in (fitting, ~fitting))
        return [
            Row("RMSE after the drift / before it", lost / before, 1.2, "", higher_is_better=True),
            Row("RMSE at the end / after the drift", learned / lost, 0.7, ""),
            Row("TTFT p50 while a version is fitted, less otherwise", during[0] - otherwise[0], 2.0, "ms"),
            Row("TTFT p99 while a version is fitted / otherwise", during[1] / otherwise[1], 1.25, ""),
        ]


def measure(data: Path, sizes: Sizes, seed: int) -> Measured:
    """One run with a server of its own."""
    first, others = _halves(data, seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train(first[:NUM_TRAINED_ON], None, RECIPES["words"]).save(folder / "predictor")
        log = folder / "log.sqlite"
        (folder / "config.toml").write_text(
            f'[log]\npath = "{log}"\n[predictor]\nlearn_every_s = {sizes.learn_every_s}\n'
        )
        options = ["--config", str(folder / "config.toml"), "--predictor", str(folder / "predictor")]
        server = RunningServer(farsight_command(EMBEDDED_TOKENIZER, options), folder / "server.log")
        try:
            server.wait_until_ready(120.0)
            began_at = time.time()
            asyncio.run(_send(server, _schedule(first[NUM_TRAINED_ON:], others, sizes, seed)))
        finally:
            server.stop()
        examples, versions = asyncio.run(_read(log))
    return _measured(examples, versions, began_at, sizes)


def _halves(data: Path, seed: int) -> tuple[list[Example], list[Example]]:
    """Requests of every other task, and of the rest; each in an order of its own."""
    found = read_examples(data, TokenCounter(EMBEDDED_TOKENIZER))
    tasks = sorted(set(found.tasks))
    halves: tuple[list[Example], list[Example]] = ([], [])
    for example, task in zip(found.examples, found.tasks, strict=True):
        if example.question.prompt_len + example.output_len <= MAX_LEN:
            halves[tasks.index(task) % 2].append(example)
    rng = np.random.default_rng(seed)
    for half in halves:
        rng.shuffle(half)
    return halves


def _schedule(
    first: Sequence[Example], others: Sequence[Example], sizes: Sizes, seed: int
) -> list[tuple[float, Example]]:
    """Poisson arrivals; the mix changes at ``before_s``. No request comes twice."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / sizes.rate, int(2 * sizes.rate * (sizes.before_s + sizes.after_s))))
    times = times[times < sizes.before_s + sizes.after_s]
    sources = {True: iter(first), False: iter(others)}
    return [(float(at), next(sources[bool(at < sizes.before_s)])) for at in times]


async def _send(server: RunningServer, schedule: list[tuple[float, Example]]) -> None:
    began = time.monotonic()
    timeout = aiohttp.ClientTimeout(total=300)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(server.command.base_url, timeout=timeout, connector=connector) as session:
        tasks = []
        for at, example in schedule:
            await asyncio.sleep(began + at - time.monotonic())
            tasks.append(asyncio.create_task(_post(session, server.command.model_name, example)))
            print(f"\r{at:6.0f} s, {len(tasks)} requests", end="", file=sys.stderr)
        await asyncio.gather(*tasks)
    print(file=sys.stderr)


async def _post(session: aiohttp.ClientSession, model: str, example: Example) -> None:
    question = example.question
    body = {
        "model": model,
        "prompt": f"{question.instruction}\n{question.user_input}",
        "instruction": question.instruction,
        "max_tokens": MAX_LEN - question.prompt_len,
        "benchmark_len": example.output_len,
    }
    async with session.post("/v1/completions", json=body) as reply:
        if reply.status != 200:
            raise RuntimeError(f"the server answered {reply.status}: {await reply.text()}")


async def _read(path: Path) -> tuple[list[LoggedExample], list[ArtefactInfo]]:
    log = SqliteLog(path, Retention(1_000_000, 1000))
    await log.open()
    try:
        examples: list[LoggedExample] = []
        row = 0
        while (page := await log.read_examples(LogQuery(row, 250))).examples:
            examples += page.examples
            row = page.last_row
        return examples, list(await log.artefacts())
    finally:
        await log.close()


def _measured(
    examples: Sequence[LoggedExample], versions: Sequence[ArtefactInfo], began_at: float, sizes: Sizes
) -> Measured:
    forecast = np.array([each.forecast.mean for each in examples])
    true = np.array([each.finished.output_len for each in examples])
    return Measured(
        np.array([each.finished.received_at - began_at for each in examples]),
        forecast - true,
        np.array([each.finished.ttft_s for each in examples], dtype=np.float64),
        sorted(each.created_at - began_at for each in versions),
        sizes,
    )


def plot(measured: Measured, path: Path) -> None:
    """RMSE and TTFT over time, by the minute, with the drift and the versions."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    edges = np.arange(0.0, measured.at_s.max() + WINDOW_S, WINDOW_S)
    inside = [(measured.at_s >= begin) & (measured.at_s < begin + WINDOW_S) for begin in edges]
    inside = [chosen for chosen in inside if chosen.sum() >= 5]
    middle = [measured.at_s[chosen].mean() / 60 for chosen in inside]
    upper.plot(middle, [np.sqrt(np.mean(measured.error[c] ** 2)) for c in inside], "o-", color="tab:blue")
    upper.set(ylabel="RMSE of the forecasts (tokens)", ylim=(0, None))
    for quantile, style in ((0.5, "o-"), (0.99, "s--")):
        values = [np.quantile(measured.ttft_s[chosen], quantile) * 1e3 for chosen in inside]
        lower.plot(middle, values, style, color="tab:green", label=f"p{quantile * 100:.0f}")
    lower.set(xlabel="minutes since the first request", ylabel="TTFT (ms)", ylim=(0, None))
    for panel in (upper, lower):
        panel.axvline(measured.sizes.before_s / 60, color="tab:red", label="the mix drifts")
        for number, at_s in enumerate(measured.versions):
            label = "a new version serves" if number == 0 else None
            panel.axvline(at_s / 60, color="gray", linestyle=":", label=label)
        panel.legend(loc="upper left")
    figure.savefig(path)


def main() -> None:
    """Prints the rows and writes the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("FARSIGHT_DATA", "../shared/data")))
    parser.add_argument("--before", type=float, default=300.0, help="seconds before the drift")
    parser.add_argument("--after", type=float, default=900.0, help="seconds after it")
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second")
    parser.add_argument("--learn-every", type=float, default=180.0, help="seconds between two fits")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, default=Path("drift.png"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sizes = Sizes(options.before, options.after, options.rate, options.learn_every)
    measured = measure(options.data / "apps_text.jsonl.gz", sizes, options.seed)
    plot(measured, options.plot)
    rows = measured.rows()
    served_s = [round(float(at), 1) for at in measured.versions]
    print(f"{len(measured.at_s)} requests; versions serve from {served_s} s on", file=sys.stderr)
    for row in rows:
        text = f"{row.claim}: {row.measured:.3g} {row.unit} ({row.verdict})"
        print(json.dumps(row.as_dict()) if options.json else text)
    sys.exit(any(row.verdict == "off" for row in rows))


if __name__ == "__main__":
    main()
