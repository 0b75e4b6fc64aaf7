"""What a step costs the host beside a GPU, measured without one: ``python -m benchmarks.gpu_host``.

Scheduler, worker and runner are put together as on a GPU; kernels are compiled for one and never run, and a recorded
step computes nothing. What is left is the host's: processor milliseconds of one core, the median of the steps.

- launch: choosing the step, writing its inputs, launching it, and the step behind it where that can be;
- read: taking the tokens;
- book: lengths, blocks, ends;
- text: detokenising;
- plan: the report to the Scheduler, and its plan.

Only the first stands between two steps where one is launched behind the other.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.gpu_models import model_config, save_random_checkpoint
from benchmarks.common.stand_in_gpu import serving
from benchmarks.gpu_offline import EMBEDDED, TINY
from farsight.core.config.engine import EngineConfig
from farsight.core.request import SamplingParams
from farsight.engine import Engine
from farsight.kvcache import StepBatch
from farsight.services.bench.report import markdown_table, provenance, write_json

PARTS = ("launch", "read", "book", "text", "plan")
CONTEXT, BLOCK, VOCAB = 1024, 64, 512
_OUTPUT, _MOST_STEPS, _STEP_S = 4 * BLOCK, 200, 0.005


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of step.

    Attributes:
        rows: Sequences that decode, at ``CONTEXT`` tokens and more.
        chunk: Tokens of a prompt beside them; 0 for none.
        chunks: Chunks of that prompt.
        drawn: Whether tokens are drawn, within a nucleus.
    """

    name: str
    rows: int
    chunk: int = 0
    chunks: int = 1
    drawn: bool = False


CASES = (
    Case("1 row", 1),
    Case("32 rows", 32),
    Case("256 rows", 256),
    Case("256 rows, top_p=0.9", 256, drawn=True),
    Case("32 rows and chunks of 512", 32, 512, 4),
    Case("a prompt of 64", 0, 64),
)


class HostBench:
    """An engine whose GPU does nothing.

    Args:
        model: A directory with a checkpoint and a tokenizer.
    """

    def __init__(self, model: Path, case: Case) -> None:
        limit = case.rows + case.chunk if case.chunk else 8192
        config = EngineConfig(
            max_num_seqs=256, max_batch_tokens=limit, block_size=BLOCK, num_threads=1, host_kv_memory="0"
        )
        self._engine = Engine(model, engine=config)
        self._case = case

    def measure(self, num_steps: int) -> dict[str, float]:
        """Returns the processor milliseconds of a step, by part."""
        case, engine = self._case, self._engine
        how: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9} if case.drawn else {}
        row = [4 + j % (VOCAB - 10) for j in range(CONTEXT - 10)]
        for i in range(case.rows):
            engine.submit([3 + i, *row], SamplingParams(_OUTPUT, ignore_eos=True, seed=i, **how))
        num_begun = 0
        while num_begun < case.rows:
            num_begun += sum(delta.start == 0 for delta in engine.step())
        found: list[list[float]] = []
        for number in range(_MOST_STEPS):
            if case.chunk and engine.scheduler.num_waiting + engine.scheduler.num_admitted == case.rows:
                engine.submit([3 + number] * case.chunk * case.chunks, SamplingParams(1))
            batch, seconds = self._step()
            num_decode = sum(item.num_tokens == 1 for item in batch.items)
            if num_decode == case.rows and (len(batch.items) > num_decode) is bool(case.chunk):
                found.append(seconds)
            if len(found) == num_steps:
                break
        parts = [1e3 * statistics.median(part) for part in zip(*found, strict=True)]
        total = 1e3 * statistics.median(map(sum, found))
        return dict(zip((*PARTS, "all"), (*parts, total), strict=True))

    def _step(self) -> tuple[StepBatch, list[float]]:
        """Makes a step as ``Engine.step`` does; returns it, and processor seconds by part."""
        worker, marks = self._engine.worker, [time.process_time()]
        batch = worker.begin_step()
        assert batch is not None, "there is work"
        worker.launch(batch)
        marks.append(time.process_time())
        tokens = worker.execute(batch)
        marks.append(time.process_time())
        emissions = worker.commit_step(batch, tokens, _STEP_S)
        marks.append(time.process_time())
        worker.render(emissions)
        marks.append(time.process_time())
        self._engine.report()
        marks.append(time.process_time())
        return batch, [end - start for start, end in pairwise(marks)]


def run(num_steps: int, tell: Callable[[str], object] = lambda line: None) -> dict[str, Any]:
    """Measures all cases; returns a record of numbers."""
    record: dict[str, Any] = {"cases": {}}
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(EMBEDDED / name, model / name)
        config = model_config("tiny", model, **{**TINY, "vocab_size": VOCAB})
        save_random_checkpoint(config, model, torch.bfloat16)
        pool_bytes = 2 * (256 * (CONTEXT + _OUTPUT) + 8192) * config.kv_bytes_per_token(torch.bfloat16)
        for case in CASES:
            with serving(pool_bytes, _nothing, largest_step=False) as kernels:
                bench = HostBench(model, case)
                record["kernels compiled at start"] = len(kernels)
                found = record["cases"][case.name] = bench.measure(num_steps)
                record["kernels compiled while serving"] = len(kernels) - record["kernels compiled at start"]
            tell(f"{case.name}: " + ", ".join(f"{part} {ms:.2f}" for part, ms in found.items()))
    return record


def _nothing(work: Callable[[], object]) -> Callable[[], None]:
    return lambda: None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="steps of each kind")
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    arguments = parser.parse_args()
    record = run(arguments.steps, lambda line: print(line, flush=True))
    rows = [[name, *(f"{ms:.2f}" for ms in found.values())] for name, found in record["cases"].items()]
    print(f"\nprocessor ms of a step\n\n{markdown_table(['step', *PARTS, 'all'], rows)}")
    write_json(arguments.json, {**provenance(["python", "-m", "benchmarks.gpu_host"]), **record})


if __name__ == "__main__":
    main()
