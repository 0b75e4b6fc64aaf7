"""What speculation brings on the tasks of the embedded model: ``python -m benchmarks.speculation``.

Engines in one process, one with and two without, answer the same prompts by turns; the order changes each time. The
ratio is the median over pairs of neighbouring turns, since another process may slow down either. The ratio of the two
engines without shows what such a ratio is worth on this machine now. Greedy; ends with status 1 if an answer differs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.weights_quality import prompts_and_answers
from farsight.core.config.engine import EngineConfig
from farsight.core.request import SamplingParams
from farsight.engine.engine import Engine
from farsight.services.bench.report import markdown_table, provenance, write_json
from lab.embedded_model.evaluate import EVALUATION_SEED, LONGEST_ANSWER
from lab.embedded_model.tasks import TASKS, held_out_examples

MODEL = Path(__file__).parents[1] / "services" / "embedded_model"
HEADER = ("task", "in flight", "tok/s with", "tok/s without", "ratio", "noise", "tokens a step", "accepted of guessed")
WITH, WITHOUT, AGAIN = "with", "without", "without again"
ENGINES = {WITH: "ngram", WITHOUT: "off", AGAIN: "off"}
"""The engines by name, each with its ``[engine] speculation``."""


@dataclass
class Turn:
    """One pass over the prompts by one engine.

    Attributes:
        answers: Tokens of each request, in the order of the prompts.
    """

    num_steps: int = 0
    num_tokens: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    answers: list[list[int]] = field(default_factory=list)


def run(engine: Engine, prompts: list[list[int]], concurrency: int) -> Turn:
    """Closed loop: so many requests are in flight, the next starts when one ends."""
    turn = Turn()
    waiting = list(reversed(prompts))
    answers: dict[str, list[int]] = {}
    num_live = 0
    wall, cpu = time.perf_counter(), time.process_time()
    while waiting or num_live:
        while waiting and num_live < concurrency:
            answers[engine.submit(waiting.pop(), SamplingParams(LONGEST_ANSWER))] = []
            num_live += 1
        for delta in engine.step():
            answers[delta.request_id] += delta.token_ids
            num_live -= delta.finish_reason is not None
        turn.num_steps += 1
    turn.wall_s, turn.cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    turn.answers = list(answers.values())
    turn.num_tokens = sum(map(len, turn.answers))
    return turn


def compare(engines: dict[str, Engine], prompts: list[list[int]], concurrency: int, repeats: int) -> dict[str, float]:
    """The engines of ``ENGINES`` by turns over the prompts.

    Returns:
        The best rates, the median ratio of neighbouring turns (by wall clock and by CPU time) with that of the two
        engines without speculation, and what was guessed.
    """
    for engine in engines.values():
        run(engine, prompts[: len(prompts) // 4], concurrency)
    speculation = engines[WITH].worker.speculation
    assert speculation is not None
    before = speculation.counts
    turns: dict[str, list[Turn]] = {name: [] for name in ENGINES}
    for number in range(repeats):
        for name in reversed(ENGINES) if number % 2 else ENGINES:
            turns[name].append(run(engines[name], prompts, concurrency))
    pairs = list(zip(turns[WITH], turns[WITHOUT], strict=True))
    alike = list(zip(turns[AGAIN], turns[WITHOUT], strict=True))
    guessed = speculation.counts.since(before)
    return {
        "tokens_per_s": max(turn.num_tokens / turn.wall_s for turn in turns[WITH]),
        "tokens_per_s_without": max(turn.num_tokens / turn.wall_s for turn in turns[WITHOUT]),
        "ratio": statistics.median(without.wall_s / own.wall_s for own, without in pairs),
        "cpu_ratio": statistics.median(without.cpu_s / own.cpu_s for own, without in pairs),
        "noise_cpu_ratio": statistics.median(without.cpu_s / again.cpu_s for again, without in alike),
        "tokens_per_step": turns[WITH][-1].num_tokens / turns[WITH][-1].num_steps,
        "tokens_per_step_without": turns[WITHOUT][-1].num_tokens / turns[WITHOUT][-1].num_steps,
        "guessed": guessed.tokens,
        "accepted": guessed.accepted,
        "num_different": sum(a != b for own, other in pairs for a, b in zip(own.answers, other.answers, strict=True)),
    }


def main() -> None:
    """Prints the table."""
    args = _parse()
    engines = {
        name: Engine(MODEL, dtype=args.dtype, engine=EngineConfig(num_threads=args.threads, speculation=speculation))
        for name, speculation in ENGINES.items()
    }
    record = {}
    rows = []
    for task in TASKS:
        if args.tasks and task.name not in args.tasks:
            continue
        prompts, _ = prompts_and_answers(held_out_examples(task, args.n, EVALUATION_SEED))
        for concurrency in args.concurrency:
            found = compare(engines, prompts, concurrency, args.repeats)
            record[f"{task.name} at {concurrency}"] = found
            rows.append(_row(task.name, concurrency, found))
            print(" ".join(rows[-1]), file=sys.stderr, flush=True)
    print(markdown_table(HEADER, rows))
    write_json(args.json, {"provenance": provenance(("python", "-m", "benchmarks.speculation")), "results": record})
    num_different = sum(found["num_different"] for found in record.values())
    if num_different:
        sys.exit(f"{num_different:.0f} answers differ with and without speculation")


def _row(task: str, concurrency: int, found: dict[str, float]) -> tuple[str, ...]:
    return (
        task,
        str(concurrency),
        f"{found['tokens_per_s']:,.0f}",
        f"{found['tokens_per_s_without']:,.0f}",
        f"{found['ratio']:.2f} (CPU {found['cpu_ratio']:.2f})",
        f"{found['noise_cpu_ratio']:.2f}",
        f"{found['tokens_per_step']:.1f} / {found['tokens_per_step_without']:.1f}",
        f"{found['accepted']:.0f} / {found['guessed']:.0f}",
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speculation", description=__doc__.split("\n")[0])
    parser.add_argument("--tasks", nargs="*", choices=[task.name for task in TASKS], help="default: all")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32], help="requests in flight")
    parser.add_argument("--n", type=int, default=64, help="prompts of a turn")
    parser.add_argument("--repeats", type=int, default=7, help="turns of each engine")
    parser.add_argument("--threads", type=int, default=1, help="compute threads of each engine")
    parser.add_argument("--dtype", default="auto", help="of the model")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
