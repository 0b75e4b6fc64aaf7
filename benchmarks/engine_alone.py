"""The engine in one process, without Ray and HTTP: ``python -m benchmarks.engine_alone --model DIR --workload NAME``.

Closed loop: so many requests are under way, the next starts when one ends. Each goes to its full length, greedily or
as ``--temperature`` and ``--top-p`` say. Prompts and seeds are those of ``farsight bench --vocab-size N`` with the same
workload, number, ``--seed`` and ``--salt``: how many guessed tokens come true depends on them, and with it the rate.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.common.servers import vocab_size
from benchmarks.common.timed_runner import TimedRunner
from farsight.core.config.engine import BACKENDS, WEIGHTS, EngineConfig
from farsight.core.request import SamplingParams
from farsight.engine.engine import Engine
from farsight.engine.sequence import OutputText
from farsight.kvcache import StepBatch
from farsight.services.bench.compare import run_salt
from farsight.services.bench.report import cell, markdown_table, provenance, write_json
from farsight.services.bench.requests import BenchRequest
from farsight.services.bench.statistics import Metrics, distribution, summarize
from farsight.services.bench.workloads import WORKLOADS, make_workload

WARM_UP_REQUESTS = 32
WARM_UP_TOKENS = 8
PROFILE_LINES = 25

COLUMNS = {
    "output tok/s": ["output_tokens_per_s"],
    "tok per CPU-s": ["output_tokens_per_cpu_s"],
    "decode step ms p50/p99": ["decode_step_ms_p50", "decode_step_ms_p99"],
    "step with prefill ms p50/p99": ["prefill_step_ms_p50", "prefill_step_ms_p99"],
    "mean batch": ["batch_size_mean"],
    "model/scheduling/detokenising %": ["execute_percent", "scheduling_percent", "detokenize_percent"],
}


@dataclass(slots=True)
class StepLog:
    """The steps of one run; times in seconds."""

    decode_s: list[float] = field(default_factory=list)
    prefill_s: list[float] = field(default_factory=list)
    batch_sizes: list[int] = field(default_factory=list)
    num_tokens: int = 0

    def add(self, batch: StepBatch, took_s: float) -> None:
        decode = all(item.num_tokens == 1 for item in batch.items)
        (self.decode_s if decode else self.prefill_s).append(took_s)
        self.batch_sizes.append(len(batch.items))


class Stopwatch:
    """Adds up the time inside methods."""

    def __init__(self) -> None:
        self.total_s = 0.0

    def around(self, method: Callable[..., str]) -> Callable[..., str]:
        def timed(*args: object) -> str:
            began = time.perf_counter()
            try:
                return method(*args)
            finally:
                self.total_s += time.perf_counter() - began

        return timed


@contextmanager
def detokenizing() -> Iterator[Stopwatch]:
    """Times the detokenizer of this process."""
    watch = Stopwatch()
    push, flush = watch.around(OutputText.push), watch.around(OutputText.flush)
    with mock.patch.object(OutputText, "push", push), mock.patch.object(OutputText, "flush", flush):
        yield watch


class EngineBench:
    """Runs workloads through one engine.

    Args:
        rows: The requests of a run.
        vocab_size: Prompts hold ids below it.
        sampling: What all requests have in common; its seed is that of the first.
        salt: As of ``farsight bench``.
    """

    def __init__(
        self, engine: Engine, rows: list[BenchRequest], vocab_size: int, sampling: SamplingParams, salt: int
    ) -> None:
        self._engine = engine
        self._salt = salt
        self._sampling = sampling
        self._rows = rows
        self._vocab_size = vocab_size
        self._num_runs = 0
        self._execute_s = 0.0
        self._last: StepBatch | None = None
        engine.worker.runner = TimedRunner(engine.worker.runner, self._note)

    def _note(self, batch: StepBatch, wall_s: float, _: float) -> None:
        self._execute_s += wall_s
        self._last = batch

    def warm_up(self, concurrency: int) -> None:
        """A few short requests, not counted."""
        self._drive(self._requests(WARM_UP_TOKENS)[:WARM_UP_REQUESTS], concurrency)

    def run(self, concurrency: int) -> Metrics:
        """One pass over the workload."""
        requests = self._requests()
        execute_before = self._execute_s
        with detokenizing() as watch:
            cpu, wall = time.process_time(), time.perf_counter()
            log = self._drive(requests, concurrency)
            wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
        execute_s = self._execute_s - execute_before
        return {
            "output_tokens": log.num_tokens,
            "wall_s": wall_s,
            "cpu_s": cpu_s,
            "output_tokens_per_s": log.num_tokens / wall_s,
            "output_tokens_per_cpu_s": log.num_tokens / cpu_s,
            "num_steps": len(log.batch_sizes),
            "batch_size_mean": statistics.fmean(log.batch_sizes),
            **distribution("decode_step_ms", [1000 * took for took in log.decode_s]),
            **distribution("prefill_step_ms", [1000 * took for took in log.prefill_s]),
            "execute_percent": 100 * execute_s / wall_s,
            "detokenize_percent": 100 * watch.total_s / wall_s,
            "scheduling_percent": 100 * (wall_s - execute_s - watch.total_s) / wall_s,
        }

    def _requests(self, most_tokens: int | None = None) -> list[tuple[list[int], SamplingParams]]:
        """Prompts that no earlier run has used, so that the prefix cache does not help."""
        self._num_runs += 1
        salt = run_salt(self._salt, self._num_runs)
        return drawn_requests(self._rows, self._vocab_size, self._sampling, salt, most_tokens)

    def _drive(self, requests: list[tuple[list[int], SamplingParams]], concurrency: int) -> StepLog:
        log = StepLog()
        coming = iter(requests)
        num_running = sum(self._submit_next(coming) for _ in range(concurrency))
        while num_running:
            began = time.perf_counter()
            deltas = self._engine.step()
            took_s = time.perf_counter() - began
            batch, self._last = self._last, None
            if batch is not None:
                log.add(batch, took_s)
            for delta in deltas:
                log.num_tokens += len(delta.token_ids)
                if delta.finish_reason is not None:
                    num_running += self._submit_next(coming) - 1
        expected = sum(sampling.max_new_tokens for _, sampling in requests)
        if log.num_tokens != expected:
            raise RuntimeError(f"{log.num_tokens} tokens came, {expected} were asked for")
        return log

    def _submit_next(self, coming: Iterator[tuple[list[int], SamplingParams]]) -> bool:
        """Whether there was one."""
        request = next(coming, None)
        if request is not None:
            self._engine.submit(*request)
        return request is not None


def drawn_requests(
    rows: Sequence[BenchRequest], vocab_size: int, sampling: SamplingParams, salt: int, most_tokens: int | None = None
) -> list[tuple[list[int], SamplingParams]]:
    """Returns what ``farsight bench`` sends in a run: prompts, and settings with the seed of each request.

    Args:
        salt: That of the run.
        most_tokens: Limit of the outputs of a warm-up.
    """
    return [
        (
            row.prompt_ids(vocab_size, salt),
            replace(
                sampling,
                max_new_tokens=min(row.output_tokens, most_tokens or row.output_tokens),
                seed=sampling.seed + row.id,
                ignore_eos=True,
            ),
        )
        for row in rows
    ]


def main() -> None:
    """Runs every concurrency and prints the table."""
    args = _parse()
    options = {
        "kv_memory": args.kv_memory,
        "max_num_seqs": args.max_num_seqs,
        "num_threads": args.threads,
        "backend": args.backend,
        "weights": args.weights,
        "speculation": args.speculation,
    }
    engine = Engine(args.model, dtype=args.dtype, engine=EngineConfig(**options))
    rows = make_workload(args.workload, args.n, args.seed)
    sampling = SamplingParams(1, temperature=args.temperature, top_p=args.top_p, seed=args.seed)
    bench = EngineBench(engine, rows, args.vocab or vocab_size(Path(args.model)), sampling, args.salt)
    levels = []
    for concurrency in args.concurrency:
        bench.warm_up(concurrency)
        runs = [bench.run(concurrency) for _ in range(args.repeats)]
        levels.append({"concurrency": concurrency, "summary": summarize(runs), "runs": runs})
    pool_tokens = engine.worker.ready.num_blocks * engine.worker.ready.block_size
    print(level_table(levels))
    head = provenance(["python", "-m", "benchmarks.engine_alone"])
    write_json(args.json, {**head, "kv_pool_tokens": pool_tokens, "levels": levels})
    if args.profile:
        with cProfile.Profile() as profile:
            bench.run(args.concurrency[-1])
        pstats.Stats(profile).sort_stats("tottime").print_stats(PROFILE_LINES)


def level_table(levels: Sequence[dict[str, Any]]) -> str:
    """A row for each concurrency."""
    rows = [
        [str(entry["concurrency"]), *(cell(entry["summary"], names) for names in COLUMNS.values())] for entry in levels
    ]
    return markdown_table(["concurrency", *COLUMNS], rows)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--workload", choices=WORKLOADS, default="skewed")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--n", type=int, default=256, help="requests")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--salt", type=int, default=0, help="as of farsight bench: another one, other prompts")
    parser.add_argument("--vocab", type=int, help="prompts hold ids below this [the model's]")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kv-memory", default="auto")
    parser.add_argument("--backend", default="auto", choices=BACKENDS)
    parser.add_argument("--weights", default="auto", choices=WEIGHTS)
    parser.add_argument("--speculation", default=EngineConfig().speculation, help="off: no step verifies guesses")
    parser.add_argument("--max-num-seqs", type=int, default=EngineConfig().max_num_seqs)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--profile", action="store_true", help="also profile a run at the last concurrency")
    parser.add_argument("--json", type=Path, help="write every number here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
