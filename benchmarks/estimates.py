"""How far estimates of time are off, on steps and batches measured here: ``python -m benchmarks.estimates [--json]``.

Steps and batches are run on the engine in this process, one compute thread, no prefix cache. Each is timed twice: wall
time, which is what a live service measures and what everything else on the machine disturbs, and the CPU time of this
process, which is what to read where the machine is not idle. An error is |estimate - measured| / measured; nothing is
judged by what it was fitted to.

- Steps: a profile fitted to the grid of ``farsight profile``, judged by the steps of a continuous-batching workload;
  and one learned during that workload: it learns from 20 steps, then must predict the next 20, by turns.
- Batches: so many requests of given lengths run together to completion. `independent` draws size, prompt and output on
  their own, log-uniform: the hardest case. `applications` draws outputs in proportion to prompts, as Magnus finds them:
  eight made-up tasks. Estimated by nearest neighbours among 3 of 4 batches, and by adding up steps.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.timed_runner import TimedRunner
from farsight.core.config.engine import EngineConfig
from farsight.core.costs import StepCost
from farsight.core.messages.step_times import StepSample
from farsight.core.request import SamplingParams
from farsight.engine.engine import Engine
from farsight.estimator.knn import MIN_BATCHES, BatchTimes, ServedBatch, padded_batch_s
from farsight.estimator.step_profile import StepLimits, StepProfile, step_grid
from farsight.kvcache.step_batch import step_sample
from farsight.services.bench.report import markdown_table, provenance
from farsight.services.commands.step_bench import StepBench, fit_steps, measure, relative_errors

EMBEDDED_MODEL = Path(__file__).parent.parent / "services" / "embedded_model"
GRID_ROUNDS = 3
TURN = 20
CONCURRENCIES = (1, 4, 16, 64)
NUM_BATCHES = 800
MAX_BATCH_SIZE = 16
TEST_SHARE = 0.25
KV_MEMORY = "256MiB"
SEED = 0

TASKS: tuple[tuple[int, float, float], ...] = ((40, 1.0, 0.05), (40, 0.95, 0.03), (90, 0.4, 0.25), (70, 1.1, 0.05))
TASKS += ((70, 0.9, 0.05), (60, 1.05, 0.02), (50, 1.6, 0.15), (120, 0.6, 0.25))
"""Median prompt, outputs over prompts, their relative spread: of 8 tasks."""

Shape = tuple[int, int, int]
"""Requests, longest prompt, longest output."""


@dataclass(frozen=True, slots=True)
class Timed:
    """A step or batch that was run: ``of`` is a ``StepSample`` or ``ServedBatch`` with its wall time."""

    of: Any
    cpu_s: float

    def by(self, clock: str) -> Any:
        """What was run with its time by this clock, ``wall`` or ``cpu``."""
        return self.of if clock == "wall" else replace(self.of, duration_s=self.cpu_s)


class EstimateBench:
    """An engine and what is asked of it.

    Args:
        model: Directory of the model.
        scale: Multiplies every number of requests and batches.
    """

    def __init__(self, model: Path, scale: float) -> None:
        self._engine = Engine(model, engine=EngineConfig(num_threads=1, prefix_cache=False, kv_memory=KV_MEMORY))
        self._rng = np.random.default_rng(SEED)
        self._scale = scale
        self._vocab_size = self._engine.worker.ready.vocab_size
        self._max_model_len = self._engine.worker.ready.max_model_len

    def grid(self) -> list[Timed]:
        """The steps of ``farsight profile``."""
        ready, config = self._engine.worker.ready, EngineConfig()
        sizes = config.max_num_seqs, config.step_tokens, ready.max_model_len, ready.block_size, ready.num_blocks
        runner: Any = self._engine.worker.runner
        steps = measure(StepBench(runner), step_grid(StepLimits(*sizes)), GRID_ROUNDS)
        return [Timed(step.sample, step.cpu_s) for step in steps]

    def workload(self) -> list[Timed]:
        """The steps of a closed loop of mixed lengths, at one concurrency after the other."""
        before, steps = self._engine.worker.runner, list[Timed]()
        self._engine.worker.runner = TimedRunner(
            before, lambda batch, wall_s, cpu_s: steps.append(Timed(step_sample(batch, wall_s), cpu_s))
        )
        for concurrency in CONCURRENCIES * 2:
            left = max(2, round(self._scale * 12 * math.sqrt(concurrency)))
            while left or not self._engine.idle:
                busy = self._engine.scheduler.num_waiting + self._engine.scheduler.num_admitted
                for _ in range(min(left, concurrency - busy)):
                    prompt = min(int(self._rng.lognormal(4.5, 1.0)) + 2, self._max_model_len // 2)
                    output = min(int(self._rng.lognormal(3.5, 0.8)) + 1, self._max_model_len - prompt)
                    self._engine.submit(self._prompt(prompt), SamplingParams(output, ignore_eos=True))
                    left -= 1
                self._engine.step()
        self._engine.worker.runner = before
        return steps

    def batches(self, draw: Callable[[np.random.Generator], Shape]) -> list[Timed]:
        """``NUM_BATCHES`` of them; members are at least 0.8 times as long as the longest."""
        return [self._batch(draw(self._rng)) for _ in range(round(self._scale * NUM_BATCHES))]

    def _batch(self, shape: Shape) -> Timed:
        num, prompt, output = shape
        prompt = min(prompt, self._max_model_len // 2)
        output = min(output, self._max_model_len - prompt)
        prompts = [self._prompt(each) for each in self._lengths(num, prompt)]
        sampling = [SamplingParams(each, ignore_eos=True) for each in self._lengths(num, output)]
        began_at, cpu_s = time.perf_counter(), time.process_time()
        self._engine.generate(prompts, sampling)
        duration_s, cpu_s = time.perf_counter() - began_at, time.process_time() - cpu_s
        return Timed(ServedBatch(num, prompt, output, duration_s), cpu_s)

    def _lengths(self, num: int, longest: int) -> list[int]:
        others = self._rng.integers(math.ceil(0.8 * longest), longest + 1, num - 1).tolist()
        return self._rng.permutation([longest, *others]).tolist()

    def _prompt(self, num_tokens: int) -> list[int]:
        return self._rng.integers(3, self._vocab_size, num_tokens).tolist()


def independent(rng: np.random.Generator) -> Shape:
    """Size 1 to 16, prompt 8 to 400, output 8 to 128."""
    low, high = np.log([1, 8, 8]), np.log([MAX_BATCH_SIZE, 400, 128])
    size, prompt, output = np.exp(rng.uniform(low, high)).round().astype(int).tolist()
    return size, prompt, output


def applications(rng: np.random.Generator) -> Shape:
    """One of ``TASKS``; size 1 to 16."""
    median, ratio, spread = TASKS[rng.integers(len(TASKS))]
    prompt = float(np.clip(rng.lognormal(math.log(median), 0.6), 8, 400))
    output = float(np.clip(ratio * prompt * rng.normal(1, spread), 4, 200))
    return int(np.exp(rng.uniform(0, math.log(MAX_BATCH_SIZE))).round()), round(prompt), round(output)


def step_rows(grid: list[Timed], steps: list[Timed], clock: str) -> Iterator[dict[str, Any]]:
    """Errors of both profiles on the steps of the workload."""
    samples = [step.by(clock) for step in steps]
    yield from _by_kind(
        "steps: profile of a grid", relative_errors(fit_steps([s.by(clock) for s in grid]), samples), samples
    )
    learned, errors, unheard_samples = StepProfile(), [], []
    for start in range(0, len(samples), 2 * TURN):
        learned.observe(samples[start : start + TURN])
        unheard = samples[start + TURN : start + 2 * TURN]
        if learned.cost() is not None:
            errors += relative_errors(learned, unheard)
            unheard_samples += unheard
    yield from _by_kind("steps: profile learned meanwhile", errors, unheard_samples)


def _by_kind(name: str, errors: list[float], samples: list[StepSample]) -> Iterator[dict[str, Any]]:
    found, prompts = np.array(errors), np.array([sample.prefill_tokens > 0 for sample in samples])
    yield _row(name, found)
    yield _row(f"{name}, with prompts", found[prompts])
    yield _row(f"{name}, decoding only", found[~prompts])


def batch_rows(name: str, batches: list[Timed], cost: StepCost, clock: str) -> Iterator[dict[str, Any]]:
    """Errors of nearest neighbours and of added steps on the batches that were not learned from."""
    served = [batch.by(clock) for batch in batches]
    num_test = round(TEST_SHARE * len(served))
    known, test = served[:-num_test], served[-num_test:]
    times = BatchTimes(cost, known)
    if len(known) >= MIN_BATCHES:
        yield _row(f"{name}: {len(known)} neighbours", _batch_errors(times, test))
    yield _row(f"{name}: steps added up", _batch_errors(lambda *shape: padded_batch_s(cost, *shape), test))


def _batch_errors(estimate_s: Callable[[int, int, int], float], batches: list[ServedBatch]) -> np.ndarray:
    shapes = [(each.batch_size, each.prompt_len, each.output_len) for each in batches]
    measured = np.array([each.duration_s for each in batches])
    return np.abs(np.array([estimate_s(*shape) for shape in shapes]) - measured) / measured


def _row(name: str, errors: np.ndarray) -> dict[str, Any]:
    return {
        "estimate": name,
        "num": len(errors),
        "median": float(np.median(errors)),
        "p90": float(np.quantile(errors, 0.9)),
    }


def query_ms(batches: list[Timed], cost: StepCost) -> float:
    """CPU milliseconds of one estimate by neighbours."""
    times = BatchTimes(cost, [batch.of for batch in batches])
    cpu_s = time.process_time()
    for batch in batches[:100]:
        times(batch.of.batch_size, batch.of.prompt_len, batch.of.output_len)
    return 1e3 * (time.process_time() - cpu_s) / min(100, len(batches))


def run(model: Path, scale: float, with_batches: bool) -> dict[str, Any]:
    """Everything, with what the machine had to spare for it."""
    bench = EstimateBench(model, scale)
    grid, steps = bench.grid(), bench.workload()
    sets = {draw.__name__: bench.batches(draw) for draw in (independent, applications) if with_batches}
    rows = {}
    for clock in ("cpu", "wall"):
        cost = fit_steps([step.by(clock) for step in steps]).cost()
        assert cost is not None
        rows[clock] = [*step_rows(grid, steps, clock)]
        for name, batches in sets.items():
            rows[clock] += batch_rows(f"batches, {name}", batches, cost, clock)
    everything = [*grid, *steps, *(batch for batches in sets.values() for batch in batches)]
    cpu_share = sum(each.cpu_s for each in everything) / sum(each.of.duration_s for each in everything)
    found = {**provenance(["python", "-m", "benchmarks.estimates"]), "cpu_share": cpu_share, "errors": rows}
    if with_batches:
        assert cost is not None
        found["neighbours_query_cpu_ms"] = query_ms(sets["independent"], cost)
    return found


def main() -> None:
    """Runs it and prints the table, or all numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=EMBEDDED_MODEL, help="directory [the embedded model]")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of requests and batches")
    parser.add_argument("--no-batches", action="store_true", help="steps only")
    parser.add_argument("--json", action="store_true", help="print every number")
    args = parser.parse_args()
    found = run(args.model, args.scale, not args.no_batches)
    if args.json:
        print(json.dumps(found))
        return
    cells = []
    for cpu, wall in zip(found["errors"]["cpu"], found["errors"]["wall"], strict=True):
        shown = [f"{100 * each[level]:.1f} %" for each in (cpu, wall) for level in ("median", "p90")]
        cells.append([cpu["estimate"], str(cpu["num"]), *shown])
    print(markdown_table(["estimate", "judged by", "CPU time: median", "p90", "wall time: median", "p90"], cells))
    print(f"\nThis process had {100 * found['cpu_share']:.0f} % of a core.")
    if "neighbours_query_cpu_ms" in found:
        print(f"An estimate by neighbours takes {found['neighbours_query_cpu_ms']:.2f} ms of CPU.")


if __name__ == "__main__":
    main()
