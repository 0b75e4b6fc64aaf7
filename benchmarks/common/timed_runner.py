"""A ``Runner`` that tells what each step ran, and how long that took."""

from __future__ import annotations

import time
from collections.abc import Callable

from farsight.engine.runner import Runner
from farsight.engine.sequence import Sequence
from farsight.engine.step_results import StepFault
from farsight.kvcache import StepBatch


class TimedRunner(Runner):
    """A runner around another one.

    Args:
        note: Called after each step with its batch, its wall time and the CPU time of this process, in seconds.
    """

    def __init__(self, runner: Runner, note: Callable[[StepBatch, float, float], None]) -> None:
        self._runner = runner
        self._note = note

    def begin(self, batch: StepBatch, sequences: dict[str, Sequence]) -> None:
        self._runner.begin(batch, sequences)

    def look_ahead(self, batch: StepBatch, sequences: dict[str, Sequence]) -> bool:
        return self._runner.look_ahead(batch, sequences)

    def go_on(self, batch: StepBatch, token_ids: list[int]) -> None:
        self._runner.go_on(batch, token_ids)

    def execute(self, batch: StepBatch, sequences: dict[str, Sequence]) -> list[int | None]:
        began_at, cpu_s = time.perf_counter(), time.process_time()
        tokens = self._runner.execute(batch, sequences)
        self._note(batch, time.perf_counter() - began_at, time.process_time() - cpu_s)
        return tokens

    def rest(self) -> None:
        self._runner.rest()

    @property
    def num_ooms(self) -> int:
        return self._runner.num_ooms

    def fault(self, error: Exception) -> StepFault:
        return self._runner.fault(error)
