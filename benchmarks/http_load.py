"""Loads an OpenAI-compatible server: ``python -m benchmarks.http_load --base-url URL --model NAME --workload FILE``.

Closed loop: so many requests are under way, the next starts when one ends. Streamed /v1/completions with token ids as
prompts, greedy, to the full length, one connection a request. Times in ms: TTFT, to the first chunk with text; TPOT,
per token after that; ITL, between chunks; MTPOT, the longest such gap of a request; JCT, to the end.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.completions import Answer, Call, make_call, send
from benchmarks.processes import ProcessTree, machine_cpu_s
from benchmarks.results import Metrics, distribution, level, level_table, provenance, write_json
from benchmarks.workload import VOCAB_SIZE, Row, read_workload

WARM_UP_REQUESTS = 32
WARM_UP_TOKENS = 8
READ_BUFFER_BYTES = 1 << 20

COLUMNS = {
    "output tok/s": ["output_tokens_per_s"],
    "TTFT ms p50/p99": ["ttft_ms_p50", "ttft_ms_p99"],
    "TPOT ms mean/p99": ["tpot_ms_mean", "tpot_ms_p99"],
    "ITL ms p50/p99": ["itl_ms_p50", "itl_ms_p99"],
    "MTPOT ms p50/p99": ["mtpot_ms_p50", "mtpot_ms_p99"],
    "JCT ms mean/p50/p99": ["jct_ms_mean", "jct_ms_p50", "jct_ms_p99"],
    "errors": ["errors"],
    "server CPU s": ["server_cpu_s"],
    "tok per server CPU-s": ["output_tokens_per_server_cpu_s"],
    "client CPU s": ["client_cpu_s"],
    "cores others use": ["other_cores"],
}


@dataclass(frozen=True, slots=True)
class Target:
    """What is loaded.

    Attributes:
        vocab_size: Prompts hold ids below it.
        plain: Send no extensions (``ignore_eos``, ``stream_options``).
        server: Its process tree, if its CPU time is to be measured.
    """

    base_url: str
    model: str
    vocab_size: int = VOCAB_SIZE
    plain: bool = False
    timeout_s: float = 600.0
    server: ProcessTree | None = None

    @property
    def url(self) -> str:
        return self.base_url.rstrip("/").removesuffix("/v1") + "/v1/completions"


class Load:
    """Sends workloads to one server; keeps what went wrong in ``errors``."""

    def __init__(self, target: Target, rows: Sequence[Row]) -> None:
        self._target = target
        self._rows = rows
        self._num_runs = 0
        self.errors: list[str] = []

    def measure(self, concurrencies: Sequence[int], repeats: int) -> list[dict[str, Any]]:
        """Warms up and measures at every concurrency."""
        levels = []
        for concurrency in concurrencies:
            asyncio.run(self._send_all(self._calls(WARM_UP_TOKENS)[:WARM_UP_REQUESTS], concurrency))
            levels.append(level(concurrency, [self._run(concurrency) for _ in range(repeats)]))
        return levels

    def _run(self, concurrency: int) -> Metrics:
        calls = self._calls()
        server = self._target.server
        before = (server.cpu_s() if server else 0.0, time.process_time(), machine_cpu_s())
        answers, wall_s = asyncio.run(self._send_all(calls, concurrency))
        after = (server.cpu_s() if server else 0.0, time.process_time(), machine_cpu_s())
        server_s, client_s, machine_s = (late - early for late, early in zip(after, before, strict=True))
        self.errors += [answer.error for answer in answers if answer.error]
        metrics = _metrics(answers, wall_s) | {"client_cpu_s": client_s}
        if server:
            metrics["server_cpu_s"] = server_s
            metrics["output_tokens_per_server_cpu_s"] = metrics["output_tokens"] / server_s if server_s else 0.0
            metrics["other_cores"] = max(0.0, machine_s - server_s - client_s) / wall_s
        return metrics

    def _calls(self, most_tokens: int | None = None) -> list[Call]:
        """Calls with prompts that no earlier run has used, so that no cache of prefixes helps."""
        salt, self._num_runs = self._num_runs, self._num_runs + 1
        target = self._target
        calls = []
        for row in self._rows:
            max_tokens = min(row.max_tokens, most_tokens or row.max_tokens)
            calls.append(make_call(row, max_tokens, target.model, target.vocab_size, salt, plain=target.plain))
        return calls

    async def _send_all(self, calls: Sequence[Call], concurrency: int) -> tuple[list[Answer], float]:
        """The answers and the seconds until the last one ended."""
        answers: list[Answer] = []
        coming = iter(calls)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=self._target.timeout_s)
        session = aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=READ_BUFFER_BYTES)
        async with session:

            async def client() -> None:
                for call in coming:
                    answers.append(await send(session, self._target.url, call))  # noqa: PERF401 (one list for all)

            began = time.perf_counter()
            await asyncio.gather(*(client() for _ in range(concurrency)))
            return answers, time.perf_counter() - began


def _metrics(answers: Sequence[Answer], wall_s: float) -> Metrics:
    good = [answer for answer in answers if answer.error is None]
    num_tokens = sum(answer.num_tokens for answer in good)
    gaps = [answer.gaps_s for answer in good]
    times = {
        "ttft_ms": [answer.ttft_s for answer in good],
        "tpot_ms": [tpot for answer in good if (tpot := answer.tpot_s) is not None],
        "itl_ms": [gap for each in gaps for gap in each],
        "mtpot_ms": [max(each) for each in gaps if each],
        "jct_ms": [answer.jct_s for answer in good],
    }
    metrics: Metrics = {
        "requests": len(answers),
        "errors": len(answers) - len(good),
        "output_tokens": num_tokens,
        "chunks": sum(len(answer.chunks_at) for answer in good),
        "wall_s": wall_s,
        "output_tokens_per_s": num_tokens / wall_s,
    }
    for name, seconds in times.items():
        metrics |= distribution(name, [1000 * value for value in seconds])
    return metrics


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say what is sent."""
    parser.add_argument("--workload", type=Path, required=True)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--n", type=int, help="only the first so many requests")
    parser.add_argument("--vocab", type=int, default=VOCAB_SIZE, help="prompts hold ids below this")
    parser.add_argument("--json", type=Path, help="write every number here")


def main() -> int:
    """Measures and prints the table; 1 if a request failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--model", required=True, help="its name at the server")
    add_load_arguments(parser)
    parser.add_argument("--plain", action="store_true", help="send no ignore_eos and no stream_options")
    parser.add_argument("--server-pid", type=int, help="measure the CPU time of this process and its descendants")
    args = parser.parse_args()
    server = ProcessTree(args.server_pid) if args.server_pid else None
    target = Target(args.base_url, args.model, args.vocab, args.plain, server=server)
    load = Load(target, read_workload(args.workload, args.n))
    levels = load.measure(args.concurrency, args.repeats)
    print(level_table(levels, COLUMNS))
    write_json(args.json, {**provenance("benchmarks.http_load"), "levels": levels, "errors": load.errors})
    return report_errors(load.errors)


def report_errors(errors: Sequence[str]) -> int:
    """Prints a few different ones; 1 if there are any."""
    for error in sorted(set(errors))[:5]:
        print(f"error ({errors.count(error)} times): {error}", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
