"""Where the time of the engine's steps goes: ``python -m benchmarks.step_timing --model DIR --threads 1 3``.

As a program it prints what the host takes between two compiled calls of a full batch that decodes, and its share of the
step; no tokens are guessed. The worker's own loop runs the steps. What a live worker does on other threads (text,
reports, plans) does not count where it is done between two steps here.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from farsight.actors.worker.step_loop import Step, StepLoop
from farsight.core.config.engine import EngineConfig
from farsight.core.request import SamplingParams
from farsight.engine.engine import Engine
from farsight.engine.native.model import NativeModel
from farsight.engine.runner import Runner
from farsight.engine.sequence import OutputText, Sequence
from farsight.engine.step_results import StepFault
from farsight.kvcache import StepBatch
from farsight.services.bench.report import markdown_table, provenance, write_json

PROMPT_TOKENS = 60


class TimedRunner(Runner):
    """A ``Runner`` that notes what it ran and how long that took."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.total_s = 0.0
        self._last: StepBatch | None = None

    def begin(self, batch: StepBatch, sequences: dict[str, Sequence]) -> None:
        self._runner.begin(batch, sequences)

    def look_ahead(self, batch: StepBatch, sequences: dict[str, Sequence]) -> bool:
        return self._runner.look_ahead(batch, sequences)

    def go_on(self, batch: StepBatch, token_ids: list[int]) -> None:
        self._runner.go_on(batch, token_ids)

    def execute(self, batch: StepBatch, sequences: dict[str, Sequence]) -> list[int | None]:
        began = time.perf_counter()
        tokens = self._runner.execute(batch, sequences)
        self.total_s += time.perf_counter() - began
        self._last = batch
        return tokens

    def rest(self) -> None:
        self._runner.rest()

    @property
    def num_ooms(self) -> int:
        return self._runner.num_ooms

    def fault(self, error: Exception) -> StepFault:
        return self._runner.fault(error)

    def take_last(self) -> StepBatch | None:
        """What the step just run held, if it ran anything."""
        batch, self._last = self._last, None
        return batch


@dataclass(slots=True)
class StepLog:
    """The steps of one run; times in seconds."""

    decode_s: list[float] = field(default_factory=list)
    prefill_s: list[float] = field(default_factory=list)
    batch_sizes: list[int] = field(default_factory=list)
    num_tokens: int = 0

    def add(self, batch: StepBatch, took_s: float) -> None:
        decode = all(item.num_tokens == 1 for item in batch.items)
        (self.decode_s if decode else self.prefill_s).append(took_s)
        self.batch_sizes.append(len(batch.items))


class Stopwatch:
    """Adds up the time inside methods."""

    def __init__(self) -> None:
        self.total_s = 0.0

    def around(self, method: Callable[..., str]) -> Callable[..., str]:
        def timed(*args: object) -> str:
            began = time.perf_counter()
            try:
                return method(*args)
            finally:
                self.total_s += time.perf_counter() - began

        return timed


@contextmanager
def detokenizing() -> Iterator[Stopwatch]:
    """Times the detokenizer of this process."""
    watch = Stopwatch()
    push, flush = watch.around(OutputText.push), watch.around(OutputText.flush)
    with mock.patch.object(OutputText, "push", push), mock.patch.object(OutputText, "flush", flush):
        yield watch


class HostTimes:
    """Runs a full batch to its end, and notes the compiled calls of the steps that decode all of it, and the host's
    time before each.

    Attributes:
        call_s: Seconds of each call.
        host_s: Seconds from the end of the call before it to its beginning.
    """

    def __init__(self, engine: Engine, batch: int) -> None:
        self.call_s: list[float] = []
        self.host_s: list[float] = []
        self._engine = engine
        self._batch = batch
        self._away_s = 0.0
        self._stepper = threading.current_thread()
        self._ended_at: float | None = None
        self._last = 0.0, 0.0

    def run(self, num_tokens: int) -> None:
        """Answers as many requests as the batch has rows, with so many tokens each."""
        for i in range(self._batch):
            prompt = [3 + (31 * i + 7 * j) % 4000 for j in range(PROMPT_TOKENS)]
            self._engine.submit(prompt, SamplingParams(num_tokens, ignore_eos=True))
        with mock.patch.object(NativeModel, "_call", self._around(NativeModel._call)):
            while not self._engine.idle:
                StepLoop(self._engine.worker, self._take, lambda outputs: None).run()

    def _around(self, call: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: Any) -> None:
            began_at = time.perf_counter()
            call(*args)
            ended_at = time.perf_counter()
            if self._ended_at is not None:
                self._last = ended_at - began_at, began_at - self._ended_at - self._away_s
            self._ended_at, self._away_s = ended_at, 0.0

        return timed

    def _take(self, step: Step) -> None:
        """Does what other threads do in a live worker."""
        began_at = time.perf_counter()
        self._engine.worker.render(step.emissions)
        self._engine.report()
        if step.sample.decode_seqs == self._batch and not step.sample.prefill_tokens:
            for times, last_s in zip((self.call_s, self.host_s), self._last, strict=True):
                times.append(last_s)
        if threading.current_thread() is self._stepper:
            self._away_s = time.perf_counter() - began_at


def _measure(model: Path, batch: int, num_threads: int, num_tokens: int, weights: str) -> dict[str, float]:
    options = EngineConfig(
        kv_memory="2GiB", max_num_seqs=batch, num_threads=num_threads, weights=weights, speculation="off"
    )
    engine = Engine(model, dtype="bfloat16", engine=options)
    times = HostTimes(engine, batch)
    times.run(num_tokens)
    call_ms, host_ms = (1000 * statistics.median(each) for each in (times.call_s, times.host_s))
    share = 100 * host_ms / (call_ms + host_ms)
    return {"threads": num_threads, "steps": len(times.call_s), "call_ms": call_ms, "host_ms": host_ms, "share": share}


def main() -> None:
    """Prints the host's share of a step with each number of threads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=60, help="output of each request")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--json", type=Path, help="write every number here")
    args = parser.parse_args()
    rows = [_measure(args.model, args.batch, threads, args.tokens, args.weights) for threads in args.threads]
    names = {"threads": "threads", "steps": "steps", "call_ms": "compiled call ms", "host_ms": "host ms", "share": "%"}
    print(markdown_table(list(names.values()), [[f"{row[name]:.3g}" for name in names] for row in rows]))
    write_json(args.json, {**provenance(["python", "-m", "benchmarks.step_timing"]), "rows": rows})


if __name__ == "__main__":
    main()
