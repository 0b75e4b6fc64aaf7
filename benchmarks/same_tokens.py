"""Checks whether a seed draws the same tokens in any batch: ``python -m benchmarks.same_tokens --model DIR``.

Each request runs alone, in one batch with all others, and once more from the middle of its output, as after the death
of a worker. Prints how many outputs differ from that of the request alone (ADR 27).
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.common.servers import vocab_size
from core.config.engine import BACKENDS, EngineConfig
from core.request import SamplingParams
from engine.engine import Engine


def main() -> None:
    """Prints the table."""
    args = _parse()
    options = EngineConfig(backend=args.backend, num_threads=args.threads, max_num_seqs=args.n)
    rng = random.Random(args.seed)
    highest = vocab_size(Path(args.model))
    prompts = [[rng.randrange(3, highest) for _ in range(rng.randint(8, 64))] for _ in range(args.n)]
    print("| dtype | backend | outputs | differ in one batch | differ when resumed |\n|---|---|---|---|---|")
    for dtype in args.dtypes:
        start = partial(Engine, args.model, dtype=dtype, engine=options)
        batched, resumed = compare(start, prompts, args.tokens, args.temperature)
        print(f"| {dtype} | {args.backend} | {args.n} of {args.tokens} tokens | {batched} | {resumed} |", flush=True)


def compare(
    start: Callable[[], Engine], prompts: list[list[int]], num_tokens: int, temperature: float
) -> tuple[int, int]:
    """How many outputs differ from those of the request alone: in one batch, and when resumed.

    Args:
        start: Makes an engine. Each case gets its own; otherwise it would find the previous KV in the prefix cache.
    """

    def sampling(seed: int, tokens: int) -> SamplingParams:
        return SamplingParams(tokens, temperature=temperature, seed=seed, ignore_eos=True)

    numbered = list(enumerate(prompts))
    engine = start()
    alone = [engine.generate([prompt], sampling(i, num_tokens))[0].token_ids for i, prompt in numbered]
    batched = start().generate(prompts, [sampling(i, num_tokens) for i, _ in numbered])
    known = [alone[i][: num_tokens // 2] for i, _ in numbered]
    resumed = start().generate(
        [[*prompt, *known[i]] for i, prompt in numbered],
        [sampling(i, num_tokens - len(known[i])) for i, _ in numbered],
    )
    return (
        sum(each.token_ids != alone[i] for i, each in enumerate(batched)),
        sum((*known[i], *each.token_ids) != alone[i] for i, each in enumerate(resumed)),
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--backend", default="auto", choices=BACKENDS)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--n", type=int, default=40, help="requests")
    parser.add_argument("--tokens", type=int, default=120, help="tokens of each output")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
