"""Time of a step with weights of 16, 8 and 4 bits, in turns: ``python -m benchmarks.weights_speed --model DIR``.

Every kind of weights computes the same steps, one after the other, again and again; the least time counts. So the
ratios hold on a machine that does other work as well.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from farsight.core.config.engine import KV_DTYPES, WEIGHTS
from farsight.core.request import Request, SamplingParams
from farsight.engine.build import BITS
from farsight.engine.sequence import Sequence
from farsight.engine.steps.model_runner import ModelRunner
from farsight.kvcache import StepBatch, StepItem
from farsight.services.bench.report import markdown_table, provenance, write_json

BLOCK_SIZE = 32
CONTEXT = 200
PROMPT = 256
BLOCKS_OF_A_SEQUENCE = PROMPT // BLOCK_SIZE


class Steps:
    """A model with weights of one kind, and steps for it.

    Args:
        most: Sequences of a step at most.
        kv_dtype: As ``engine.kv_dtype``.
    """

    def __init__(self, model: Path, weights: str, num_threads: int, most: int, kv_dtype: str = "auto") -> None:
        self._runner = ModelRunner.from_dir(
            model,
            dtype=torch.bfloat16,
            num_blocks=most * BLOCKS_OF_A_SEQUENCE,
            block_size=BLOCK_SIZE,
            bits=BITS[weights],
            num_threads=num_threads,
            kv_dtype=kv_dtype,
        )
        for cache in (*self._runner.pool.keys, *self._runner.pool.values):
            cache.view(torch.uint8).zero_()
        tokens = tuple(3 + i % 100 for i in range(PROMPT))
        request = Request("", 0, "", tokens, SamplingParams(1))
        self._sequences = {str(i): Sequence.of(request) for i in range(most)}

    def decode(self, num_rows: int) -> float:
        """Seconds of a step of so many sequences, each with one token behind ``CONTEXT``."""
        return self._time([(i, CONTEXT, 1) for i in range(num_rows)])

    def prefill(self) -> float:
        """Seconds of a step with a prompt of ``PROMPT`` tokens."""
        return self._time([(0, 0, PROMPT)])

    def _time(self, items: list[tuple[int, int, int]]) -> float:
        batch = StepBatch(
            tuple(
                StepItem(
                    str(i), start, count, True, list(range(i * BLOCKS_OF_A_SEQUENCE, (i + 1) * BLOCKS_OF_A_SEQUENCE))
                )
                for i, start, count in items
            )
        )
        began = time.perf_counter()
        self._runner.execute(batch, self._sequences)
        return time.perf_counter() - began


def main() -> None:
    """Prints milliseconds, and how many times as fast as the first kind each of the others is."""
    args = _parse()
    models = {
        weights: Steps(args.model, weights, args.threads, max(args.rows), args.kv_dtype) for weights in args.weights
    }
    least: dict[tuple[str, str], float] = {}
    for _ in range(args.rounds):
        for name in [*(f"decode {rows}" for rows in args.rows), f"prefill {PROMPT}"]:
            for weights, steps in models.items():
                took = steps.decode(int(name.split()[1])) if name.startswith("decode") else steps.prefill()
                least[name, weights] = min(least.get((name, weights), took), took)
    names = list(dict.fromkeys(name for name, _ in least))
    first = args.weights[0]
    table = [
        [weights, *(f"{1000 * least[n, weights]:.2f} ({least[n, first] / least[n, weights]:.2f})" for n in names)]
        for weights in args.weights
    ]
    print(markdown_table(["weights, ms (times as fast)", *names], table))
    write_json(
        args.json,
        {
            **provenance(["python", "-m", "benchmarks.weights_speed"]),
            "seconds": {f"{weights}, {name}": took for (name, weights), took in least.items()},
        },
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS[1:], default=WEIGHTS[1:])
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--threads", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path, help="write every number here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
