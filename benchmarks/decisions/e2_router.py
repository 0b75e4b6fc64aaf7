"""Placements a second of E2, with all that belongs to them: insertion, evictions, ends, the window."""

from __future__ import annotations

import gzip
import heapq
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.decisions.row import Row
from farsight.core.costs import StepCost
from farsight.core.messages.plans import KVCacheEvent
from farsight.kvcache.block_manager import hash_blocks
from farsight.policies.placement.base import ReplicaLoad
from farsight.policies.placement.e2 import E2Router
from farsight.policies.placement.load_cost import from_step_cost

Arrival = tuple[float, tuple[int, ...], int, int]
"""(arrival in seconds, block hashes, prompt tokens, output tokens)"""

COST = StepCost(base_s=5e-3, prefill_token_s=1e-4, decode_seq_s=1e-4, context_token_s=2e-8)
"""About a model of 7 billion parameters on one device."""


def data_dir() -> Path:
    """Where the data sets lie: ``FARSIGHT_DATA``, or ``../shared/data`` beside the repository."""
    default = Path(__file__).parents[2].parent / "shared" / "data"
    return Path(os.environ.get("FARSIGHT_DATA", default))


def conversation() -> list[Arrival]:
    """The conversation trace of Mooncake (FAST 2025): blocks of 512 tokens, arrivals as recorded."""
    return [
        (
            row["arrival_s"],
            tuple(row["hash_ids"][: row["input_tokens"] // 512]),
            row["input_tokens"],
            row["output_tokens"],
        )
        for row in _read("mooncake_conversation.jsonl.gz")
    ]


def tools(num: int = 8000, block_size: int = 64, rate: float = 50.0) -> list[Arrival]:
    """Tool prompts and few-shot prompts, prefixes drawn by Zipf's law of 1.1, Poisson arrivals."""
    rng = np.random.default_rng(1)
    rows = [
        row for row in _read("prefix_groups.jsonl.gz") if row["workload"] == "toolbench" or "react" in row["workload"]
    ]
    rows = [rows[i] for i in rng.permutation(len(rows))]
    shares = 1.0 / np.arange(1, len(rows) + 1) ** 1.1
    drawn = rng.choice(len(rows), num, p=shares / shares.sum())
    arrivals = np.cumsum(rng.exponential(1 / rate, num))
    words: dict[str, int] = {}
    prefixes: dict[int, list[int]] = {}
    paths: list[Arrival] = []
    for at, i in zip(arrivals, drawn, strict=True):
        prefix = prefixes.setdefault(int(i), _tokens(rows[i]["prefix"], words))
        request = rows[i]["requests"][int(rng.integers(len(rows[i]["requests"])))]
        tokens = prefix + _tokens(request["input"], words)
        paths.append((float(at), tuple(hash_blocks(tokens, block_size)), len(tokens), 43))
    return paths


def drive(
    arrivals: list[Arrival], block_size: int, num_replicas: int, capacity: int = 200_000
) -> tuple[float, E2Router]:
    """Seconds that E2 takes for these arrivals: each starts 0.5 s later and ends after 25 ms a token.

    Every 200th start finds no cached prefix; after every 20th end, a KV cache event reports the path's last block
    evicted.
    """
    router = E2Router(from_step_cost(COST), block_size)
    loads = tuple(ReplicaLoad(f"r{i}", 0, 0.0) for i in range(num_replicas))
    for load in loads:
        router.replica_up(load.name, capacity)
    due: list[tuple[float, int, bool]] = []
    replicas = [""] * len(arrivals)
    hits = [0] * len(arrivals)
    spent = 0.0
    clock = time.perf_counter
    for i, (now, path, prompt_len, _) in enumerate(arrivals):
        while due and due[0][0] <= now:
            at, j, ends = heapq.heappop(due)
            begin = clock()
            if ends:
                router.ended(str(j), arrivals[j][3], at)
                if j % 20 == 0:
                    router.noticed(replicas[j], KVCacheEvent(0, False, evicted=arrivals[j][1][-1:]))
            else:
                router.started(str(j), hits[j] if j % 200 else 0, 0.5, at)
            spent += clock() - begin
        begin = clock()
        choice = router.place(str(i), path, prompt_len, loads, now)
        spent += clock() - begin
        replicas[i], hits[i] = choice.replica, choice.hit_len
        heapq.heappush(due, (now + 0.5, i, False))
        heapq.heappush(due, (now + 0.5 + 0.025 * arrivals[i][3], i, True))
    return spent, router


def rows() -> list[Row]:
    """Skipped, with a line that says why, where the data sets are not there."""
    if not data_dir().is_dir():
        print(
            f"e2_router: no data sets in {data_dir()}; set FARSIGHT_DATA (Mooncake traces, StableToolBench and ReAct)"
        )
        return []
    chat, tool = conversation(), tools()
    return [
        _row("E2: Mooncake conversation, 64 replicas", chat, 512, 64, 10_000),
        Row("E2: a placement of it among 1000 replicas", 1e6 / _rate(chat, 512, 1000), 150, "us"),
        _row("E2: tool prompts (Zipf 1.1), 64 replicas", tool, 64, 64, 5_000),
        Row("E2: a placement of them among 1000 replicas", 1e6 / _rate(tool, 64, 1000), 150, "us"),
    ]


def _row(claim: str, arrivals: list[Arrival], block_size: int, num_replicas: int, target: float) -> Row:
    return Row(claim, _rate(arrivals, block_size, num_replicas), target, "placements/s", higher_is_better=True)


def _rate(arrivals: list[Arrival], block_size: int, num_replicas: int) -> float:
    """Placements a second, the best of three runs."""
    return len(arrivals) / min(drive(arrivals, block_size, num_replicas)[0] for _ in range(3))


def _read(name: str) -> Iterator[dict[str, Any]]:
    with gzip.open(data_dir() / name, "rt") as lines:
        for line in lines:
            yield json.loads(line)


def _tokens(text: str, words: dict[str, int]) -> list[int]:
    """About as many ids as a tokenizer gives: words and punctuation marks, 1.3 of each in the mean."""
    ids = [words.setdefault(word, len(words)) for word in re.findall(r"\w+|[^\w\s]", text)]
    return [each for i, each in enumerate(ids) for _ in range(1 + (i % 10 < 3))]
