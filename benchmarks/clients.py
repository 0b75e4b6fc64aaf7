"""Whether other load generators measure what ``farsight bench`` measures: ``python -m benchmarks.clients``.

One server on an emulated A100; by turns each tool sends the same load: ``--requests`` prompts of ``--prompt-tokens``,
each with ``--output-tokens`` of output, ``--concurrency`` in flight. Prints the medians over the rounds of output
tokens a second, mean time to first token, and mean time between the tokens of a request, and the ratios to those of
``farsight bench``. The tools are not dependencies: ``--guidellm``, ``--vllm`` and ``--aiperf`` name their programs.

The server has no prefix cache. The "random" prompts of ``vllm bench serve`` are runs of consecutive token ids modulo
the vocabulary; with a small vocabulary they begin alike, and a cache would spare its prompts, and no other tool's, half
of their computation.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.servers import RunningServer, ServerCommand, free_port
from services.launch.launch import EMBEDDED_MODEL, EMBEDDED_NAME

READY_S = 180.0
RUN_S = 600.0
OWN = "farsight bench"


@dataclass(frozen=True, slots=True)
class Figures:
    """What a tool says of one run.

    Attributes:
        tokens_s: Output tokens a second over the whole run.
        ttft_ms: Mean time to first token.
        itl_ms: Mean over requests of the time between two tokens: what follows the first, over the tokens but one.
    """

    tokens_s: float
    ttft_ms: float
    itl_ms: float


@dataclass(frozen=True, slots=True)
class Load:
    url: str
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    concurrency: int


def run_own(load: Load, folder: Path) -> Figures:
    lengths, found = folder / "lengths.csv", folder / "own.json"
    rows = [f"{index * 0.01},{load.prompt_tokens},{load.output_tokens}" for index in range(load.num_requests)]
    lengths.write_text("\n".join(["arrived_at,input_length,output_length", *rows]) + "\n")
    vocabulary = json.loads((EMBEDDED_MODEL / "config.json").read_text())["vocab_size"]
    words = [sys.executable, "-m", "services.cli", "bench", "--url", load.url, "--trace", str(lengths)]
    words += ["--concurrency", str(load.concurrency), "--num-requests", str(load.num_requests), "--warm-up", "0"]
    words += ["--prompt-form", "ids", "--vocab-size", str(vocabulary), "--keep-alive", "--json", str(found)]
    _run(words)
    summary = json.loads(found.read_text())["cases"][0]["targets"][0]["summary"]
    return Figures(*(summary[name]["median"] for name in ("output_tokens_per_s", "ttft_ms_mean", "tpot_ms_mean")))


def run_guidellm(program: str, load: Load, folder: Path) -> Figures:
    found = folder / "guidellm.json"
    data = f"kind=synthetic_text,prompt_tokens={load.prompt_tokens},output_tokens={load.output_tokens}"
    words = [
        program,
        "run",
        "--disable-console",
        "--backend",
        f"kind=openai_http,target={load.url},model={EMBEDDED_NAME}",
    ]
    words += ["--profile", f"kind=concurrent,streams={load.concurrency}", "--data", data]
    words += ["--constraint", f"kind=max_requests,count={load.num_requests}"]
    words += ["--tokenizer", f"kind=hf_auto,model={EMBEDDED_MODEL}", "--output", f"kind=json,path={found}"]
    _run(words)
    metrics = json.loads(found.read_text())["benchmarks"][0]["metrics"]
    names = ("output_tokens_per_second", "time_to_first_token_ms", "inter_token_latency_ms")
    return Figures(*(metrics[name]["successful"]["mean"] for name in names))


def run_vllm(program: str, load: Load, folder: Path) -> Figures:
    words = [program, "bench", "serve", "--backend", "openai", "--base-url", load.url, "--model", EMBEDDED_NAME]
    words += ["--tokenizer", str(EMBEDDED_MODEL), "--dataset-name", "random", "--ignore-eos", "--disable-tqdm"]
    words += ["--random-input-len", str(load.prompt_tokens), "--random-output-len", str(load.output_tokens)]
    words += ["--num-prompts", str(load.num_requests), "--max-concurrency", str(load.concurrency)]
    words += ["--save-result", "--result-dir", str(folder), "--result-filename", "vllm.json"]
    _run(words)
    found = json.loads((folder / "vllm.json").read_text())
    return Figures(found["output_throughput"], found["mean_ttft_ms"], found["mean_tpot_ms"])


def run_aiperf(program: str, load: Load, folder: Path) -> Figures:
    words = [program, "profile", "--model", EMBEDDED_NAME, "--url", load.url, "--endpoint-type", "completions"]
    words += ["--streaming", "--tokenizer", str(EMBEDDED_MODEL), "--ui", "none", "--artifact-dir", str(folder)]
    words += ["--synthetic-input-tokens-mean", str(load.prompt_tokens), "--synthetic-input-tokens-stddev", "0"]
    words += ["--output-tokens-mean", str(load.output_tokens), "--output-tokens-stddev", "0"]
    words += ["--use-server-token-count", "--extra-inputs", "ignore_eos:true", "--concurrency", str(load.concurrency)]
    words += ["--request-count", str(load.num_requests)]
    _run(words)
    found = json.loads(next(folder.rglob("profile_export_aiperf.json")).read_text())
    names = ("output_token_throughput", "time_to_first_token", "inter_token_latency")
    return Figures(*(found[name]["avg"] for name in names))


def _run(words: list[str]) -> None:
    """One run of a tool.

    Raises:
        RuntimeError: It failed; the message has what it printed last.
    """
    ran = subprocess.run(words, capture_output=True, text=True, timeout=RUN_S)
    if ran.returncode:
        raise RuntimeError(f"{words[0]} ended with status {ran.returncode}: {(ran.stdout + ran.stderr)[-2000:]}")


def measure(load: Load, tools: dict[str, Callable[[Load, Path], Figures]], rounds: int) -> dict[str, list[Figures]]:
    found: dict[str, list[Figures]] = {name: [] for name in tools}
    for _ in range(rounds):
        for name, run in tools.items():
            folder = Path(tempfile.mkdtemp(prefix="farsight-clients-"))
            found[name].append(run(load, folder))
            shutil.rmtree(folder)
    return found


def table(found: dict[str, list[Figures]]) -> list[dict[str, Any]]:
    """A row for each tool: the medians, and their ratios to our own."""
    medians = {
        name: [statistics.median(getattr(each, field) for each in runs) for field in Figures.__slots__]
        for name, runs in found.items()
    }
    return [
        {"tool": name}
        | {field: round(value, 2) for field, value in zip(Figures.__slots__, values, strict=True)}
        | {
            f"{field}_ratio": round(value / own, 3)
            for field, value, own in zip(Figures.__slots__, values, medians[OWN], strict=True)
        }
        for name, values in medians.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.clients", description="Load generators, compared.")
    others: dict[str, Callable[[str, Load, Path], Figures]] = {
        "guidellm": run_guidellm,
        "vllm": run_vllm,
        "aiperf": run_aiperf,
    }
    for name in others:
        parser.add_argument(f"--{name}", metavar="PROGRAM", help=f"path of {name}'s program")
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--output-tokens", type=int, default=60)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    port = free_port()
    words = ["-m", "services.cli", "serve", "--device", "emulated:a100-7b", "--benchmark-mode", "--port", str(port)]
    words += ["--max-model-len", "4096", "--no-prefix-cache"]
    command = ServerCommand([sys.executable, *words], port, EMBEDDED_NAME)
    server = RunningServer(command, Path(tempfile.mkdtemp(prefix="farsight-clients-")) / "server.log")
    try:
        server.wait_until_ready(READY_S)
        load = Load(command.base_url, args.requests, args.prompt_tokens, args.output_tokens, args.concurrency)
        tools: dict[str, Callable[[Load, Path], Figures]] = {OWN: run_own}
        for name, run in others.items():
            program = getattr(args, name)
            if program:
                tools[name] = lambda load, folder, run=run, program=program: run(program, load, folder)  # type: ignore[misc]
        for row in table(measure(load, tools, args.rounds)):
            print(json.dumps(row))
    finally:
        server.stop()


if __name__ == "__main__":
    main()
