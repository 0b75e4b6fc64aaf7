"""Requests that arrive together and share prefixes: ``python -m benchmarks.prefix_batches --model DIR``.

Counts the prompt tokens that the steps compute, beside those that have to be computed once: a prefix that is being
computed is waited for, step by step, and not computed again. The engine runs alone; the same requests run without the
prefix cache.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from benchmarks.common.servers import vocab_size
from benchmarks.step_timing import TimedRunner
from farsight.core.config.engine import EngineConfig
from farsight.core.request import SamplingParams
from farsight.engine.engine import Engine
from farsight.kvcache.block_manager import hash_blocks
from farsight.services.bench.report import markdown_table, provenance, write_json
from farsight.services.bench.workloads import make_workload

Row = dict[str, float]


def run(model: Path, prompts: list[list[int]], num_threads: int, num_tokens: int, *, prefix_cache: bool) -> Row:
    """Answers all prompts, which arrive at once."""
    options = EngineConfig(kv_memory="1GiB", num_threads=num_threads, prefix_cache=prefix_cache)
    engine = Engine(model, dtype="bfloat16", engine=options)
    runner = engine.worker.runner = TimedRunner(engine.worker.runner)
    for prompt in prompts:
        engine.submit(prompt, SamplingParams(num_tokens, ignore_eos=True))
    computed = answered = 0
    began_at, all_answered_s = time.perf_counter(), 0.0
    while not engine.idle:
        deltas = engine.step()
        batch = runner.take_last()
        known = {} if batch is None else {item.request_id: item for item in batch.items}
        computed += sum(item.num_tokens for item in known.values())
        answered += sum(delta.start == 0 for delta in deltas)
        if answered == len(prompts) and not all_answered_s:
            all_answered_s = time.perf_counter() - began_at
    size = engine.worker.ready.block_size
    blocks = {block for prompt in prompts for block in hash_blocks(prompt, size)}
    once = len(blocks) * size + sum(len(prompt) % size for prompt in prompts)
    return {
        "prompt_tokens": sum(map(len, prompts)),
        "once_tokens": once,
        "computed_tokens": computed - len(prompts) * (num_tokens - 1),
        "first_tokens_s": all_answered_s,
    }


def main() -> None:
    """Prints a row with the prefix cache and one without."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--n", type=int, default=32, help="requests")
    parser.add_argument("--groups", type=int, default=2, help="prefixes")
    parser.add_argument("--prefix-tokens", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=4, help="output of each request")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write every number here")
    args = parser.parse_args()
    workload = make_workload("prefix", args.n, 1, num_groups=args.groups, prefix_tokens=args.prefix_tokens)
    prompts = [row.prompt_ids(vocab_size(args.model), 0) for row in workload]
    rows = {
        name: run(args.model, prompts, args.threads, args.tokens, prefix_cache=name == "on") for name in ("on", "off")
    }
    header = ["prefix cache", "prompt tokens", "to compute once", "computed", "seconds to the last first token"]
    print(markdown_table(header, [[name, *(f"{value:.4g}" for value in row.values())] for name, row in rows.items()]))
    write_json(args.json, {**provenance(["python", "-m", "benchmarks.prefix_batches"]), "rows": rows})


if __name__ == "__main__":
    main()
