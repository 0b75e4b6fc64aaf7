"""Whole steps of a model whose matrices are kept as the checkpoint has them, or rounded to 8 or 4 bits."""

from __future__ import annotations

import time
from collections.abc import Sequence as Listed
from pathlib import Path

import torch

from farsight.core.request import Request, SamplingParams
from farsight.engine.build import BITS
from farsight.engine.sequence import Sequence
from farsight.engine.steps.model_runner import ModelRunner
from farsight.kvcache import StepBatch, StepItem
from farsight.services.bench.report import markdown_table

BLOCK_SIZE = 32
CONTEXT = 200


class Steps:
    """A model with weights of one kind, and steps for it.

    Args:
        weights: As ``engine.weights``.
        most: Sequences of a step at most.
        prompt: Tokens of the longest prompt.
        kv_dtype: As ``engine.kv_dtype``.
    """

    def __init__(
        self, model: Path, weights: str, dtype: str, num_threads: int, most: int, prompt: int, kv_dtype: str = "auto"
    ) -> None:
        self._blocks = -(-max(prompt, CONTEXT + 1) // BLOCK_SIZE)
        self._runner = ModelRunner.from_dir(
            model,
            dtype=getattr(torch, dtype),
            num_blocks=most * self._blocks,
            block_size=BLOCK_SIZE,
            bits=BITS[weights],
            keep_quantized=weights != "float",
            num_threads=num_threads,
            kv_dtype=kv_dtype,
        )
        for cache in (*self._runner.pool.keys, *self._runner.pool.values):
            cache.view(torch.uint8).zero_()
        tokens = tuple(3 + i % 100 for i in range(max(prompt, CONTEXT + 1)))
        request = Request("", 0, "", tokens, SamplingParams(1))
        self._sequences = {str(i): Sequence.of(request) for i in range(most)}

    def decode(self, num_rows: int) -> float:
        """Returns seconds of a step of so many sequences, each with one token behind ``CONTEXT``."""
        return self._time([(i, CONTEXT, 1) for i in range(num_rows)])

    def prefill(self, num_tokens: int) -> float:
        """Returns seconds of a step with a prompt."""
        return self._time([(0, 0, num_tokens)])

    def _time(self, items: list[tuple[int, int, int]]) -> float:
        batch = StepBatch(
            tuple(
                StepItem(str(i), start, count, True, list(range(i * self._blocks, (i + 1) * self._blocks)))
                for i, start, count in items
            )
        )
        began = time.perf_counter()
        self._runner.execute(batch, self._sequences)
        return time.perf_counter() - began


def compared_steps(
    models: dict[str, Steps], rows: Listed[int], prompts: Listed[int], rounds: int
) -> tuple[str, dict[str, float]]:
    """Runs all kinds by turns; the least time of each counts.

    Returns:
        A table of milliseconds, and how many times as fast as the first kind each of the others is; and all seconds.
    """
    cases = [*((f"decode {count}", count) for count in rows), *((f"prefill {count}", count) for count in prompts)]
    least: dict[tuple[str, str], float] = {}
    for _ in range(rounds):
        for name, count in cases:
            for weights, steps in models.items():
                took = steps.decode(count) if name.startswith("decode") else steps.prefill(count)
                least[name, weights] = min(least.get((name, weights), took), took)
    first = next(iter(models))
    names = [name for name, _ in cases]
    table = [
        [weights, *(f"{1000 * least[n, weights]:.2f} ({least[n, first] / least[n, weights]:.2f})" for n in names)]
        for weights in models
    ]
    seconds = {f"{weights}, {name}": took for (name, weights), took in least.items()}
    return markdown_table(["weights, ms (times as fast)", *names], table), seconds
