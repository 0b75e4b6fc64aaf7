"""Where the time of the engine's steps goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

from engine.sequence import OutputText, Sequence
from engine.step_fault import StepFault
from engine.worker import Runner
from kvcache import StepBatch


class TimedRunner:
    """A ``Runner`` that notes what it ran and how long that took."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.total_s = 0.0
        self._last: StepBatch | None = None

    def begin(self, batch: StepBatch, sequences: dict[str, Sequence]) -> None:
        self._runner.begin(batch, sequences)

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
