"""What choosing tokens costs: ``python -m benchmarks.sampler_cost [--torch] [--rows 1 32] [--json FILE]``.

Processor time on one thread of one call for all rows, the least of several, at the vocabularies of published models.
Logits are normal with a deviation of 3. Each figure comes with its multiple of reading the rows once (their sum), for
other processors. Penalties look at 4,000 tokens of each row.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from farsight.core.request import SamplingParams
from farsight.engine.native.sampler import NativeSampler
from farsight.engine.sampling.sampler import Sampler
from farsight.engine.sequence import TokenCounts
from farsight.services.bench.report import markdown_table, provenance, write_json

VOCABULARIES = (49_152, 151_936, 262_144)
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 0.8": {},
    "top_k 20, top_p 0.95": {"top_k": 20, "top_p": 0.95},
    "top_p 0.95": {"top_p": 0.95},
    "min_p 0.05": {"min_p": 0.05},
    "top_p 0.95, penalties": {"top_p": 0.95, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
}
HISTORY_TOKENS = 4_000
REPEATS = 15


class CountedHistory(NamedTuple):
    """A sequence whose tokens are counted already, as in a step that only decodes."""

    token_ids: list[int]
    prompt_len: int
    counted: TokenCounts

    def token_counts(self) -> TokenCounts:
        return self.counted


def least_ms(call: Callable[[int], object]) -> float:
    """Processor time of this thread."""
    times = []
    for repeat in range(REPEATS):
        began = time.thread_time()
        call(repeat)
        times.append(time.thread_time() - began)
    return 1e3 * min(times)


def measure(sampler: Sampler, num_rows: int, vocab_size: int) -> dict[str, float]:
    """Returns milliseconds by what is done."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(num_rows, vocab_size, generator=generator)
    rng = random.Random(0)
    histories = []
    for _ in range(num_rows):
        tokens = [rng.randrange(vocab_size) for _ in range(HISTORY_TOKENS)]
        histories.append(CountedHistory(tokens, HISTORY_TOKENS // 2, TokenCounts(tokens, HISTORY_TOKENS // 2)))
    found = {"read": least_ms(lambda repeat: logits.sum())}
    best = [0] * num_rows  # as after a compiled step
    for name, options in SETTINGS.items():
        params = [SamplingParams(64, temperature=0.8, seed=seed, **options) for seed in range(num_rows)]
        found[name] = least_ms(lambda at, each=params: sampler.sample(logits, each, [at] * num_rows, histories, best))  # type: ignore[misc]
    greedy = [SamplingParams(64)] * num_rows
    found["greedy"] = least_ms(lambda at: sampler.sample(logits, greedy, [at] * num_rows, histories, best))
    ask = [5] * num_rows, [20] * num_rows
    found["log probabilities, top 20"] = least_ms(lambda at: sampler.token_logprobs(logits, range(num_rows), *ask))
    return found


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", action="store_true", help="the sampler by torch operations")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=list(VOCABULARIES))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sampler = Sampler() if arguments.torch else NativeSampler()
    cells = {
        (rows, vocab_size): measure(sampler, rows, vocab_size)
        for rows in arguments.rows
        for vocab_size in arguments.vocabularies
    }
    names = next(iter(cells.values()))
    table = [
        [name, *(f"{found[name]:.3g} ({found[name] / found['read']:.2g})" for found in cells.values())]
        for name in names
    ]
    print("milliseconds of processor time (multiple of reading the rows)")
    print(markdown_table(["", *(f"{rows} x {vocab_size:,}" for rows, vocab_size in cells)], table))
    if arguments.json:
        rows_found = [{"rows": rows, "vocabulary": size, **found} for (rows, size), found in cells.items()]
        write_json(arguments.json, {**provenance(["python", "-m", "benchmarks.sampler_cost"]), "cells": rows_found})


if __name__ == "__main__":
    main()
