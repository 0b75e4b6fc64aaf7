"""Two stages with two batches under way against one: ``python -m benchmarks.parallel``.

The same two processes, the same requests, in turns: only how many steps may be under way at once differs. With one, a
stage waits while the other computes. With two, half the sequences are in each batch, so what a step costs however few
are in it is paid twice: the ratio that can be had is the time of a whole batch over that of a half.

Stages are emulated (``benchmarks.parallel.emulated``) unless ``--real``: then random weights in float32 over gloo, one
thread for each stage, which needs two otherwise idle CPUs.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from benchmarks.make_model import PRESETS, random_model, train_tokenizer
from benchmarks.parallel.emulated import BASE_S, ROW_S, emulate_stages, stage_s
from farsight.core.config.engine import EngineConfig
from farsight.core.processors import usable_processors
from farsight.core.request import SamplingParams
from farsight.engine import Engine
from farsight.engine.parallel.links import RANK_MODULE, LocalRanks
from farsight.engine.parallel.mesh import Mesh

PROMPT_LEN = 4
NUM_TOKENS = 16


def main() -> None:
    """Prints a line a batch size."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--real", action="store_true", help="compute: the medium random model")
    parser.add_argument("--batch", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if not args.real:
        emulate_stages()
    with tempfile.TemporaryDirectory() as folder:
        _make_model("medium" if args.real else "tiny", Path(folder))
        ranks = LocalRanks(Mesh(tensor=1, pipeline=2), RANK_MODULE if args.real else "benchmarks.parallel.emulated")
        config = EngineConfig(kv_memory="64MiB", num_threads=1, prefix_cache=False)
        engine = Engine(folder, dtype="float32", engine=config, ranks=ranks.ranks)
        stage = "computing" if args.real else f"emulated: {BASE_S * 1e3:.0f} ms + {ROW_S * 1e3:.0f} ms a row each"
        print(f"2 stages, {stage}; {usable_processors()} processors, load {os.getloadavg()[0]:.1f}")
        print("batch  tokens/s: 1 under way  2 under way  ratio (range)" + ("" if args.real else "  of at most"))
        for batch in args.batch:
            line = _compare(engine, batch, args.repeats)
            print(line if args.real else f"{line}  {stage_s(batch) / stage_s(-(-batch // 2)):9.2f}", flush=True)
        ranks.close()


def _make_model(preset: str, folder: Path) -> None:
    transformers_logging.disable_progress_bar()
    tokenizer = train_tokenizer()
    random_model(PRESETS[preset], tokenizer, torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _compare(engine: Engine, batch: int, repeats: int) -> str:
    rates: dict[int, list[float]] = {1: [], 2: []}
    for repeat in range(repeats + 1):
        for under_way, found in rates.items():
            rate = _tokens_per_s(engine, batch, under_way)
            if repeat:  # the first of each warms up
                found.append(rate)
    ratios = [two / one for one, two in zip(rates[1], rates[2], strict=True)]
    one, two = (statistics.median(rates[each]) for each in (1, 2))
    spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
    return f"{batch:>5} {one:>21.0f} {two:>12.0f}   {statistics.median(ratios):.2f} {spread}"


def _tokens_per_s(engine: Engine, batch: int, under_way: int) -> float:
    engine.worker.executor.max_in_flight = under_way
    rng = random.Random(batch)
    prompts = [[rng.randrange(3, 4000) for _ in range(PROMPT_LEN)] for _ in range(batch)]
    began = time.perf_counter()
    engine.generate(prompts, SamplingParams(NUM_TOKENS, ignore_eos=True))
    return batch * NUM_TOKENS / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
