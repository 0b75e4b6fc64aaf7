"""Steps of one batch that follow each other without a change, taken at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvcache import StepBatch
from kvcache.step_batch import StepWork
from simulator.cluster.latency import LatencyModel


@dataclass(slots=True)
class StepRun:
    """Equal steps in progress, recorded when the last is over.

    Attributes:
        work: Work of the first step; each further one has one token of context more per decoding sequence.
        num_steps: 1 if the step computes prompts or may be cut off.
        ends_at: When the last of them is over.
        num_told: So many of them have been reported to the scheduler.
    """

    batch: StepBatch
    work: StepWork
    latency: LatencyModel
    began_at: float
    num_steps: int
    ends_at: float = math.inf
    num_told: int = 0

    def seconds(self, num_steps: int) -> float:
        """Seconds of the first steps."""
        if num_steps == 0:
            return 0.0
        return min(self._whole_s(num_steps), self.batch.cut_off_s)

    @property
    def is_cut_off(self) -> bool:
        """Whether the step is cut off before its end: it brings nothing."""
        return self.batch.may_be_cut_off and self.batch.cut_off_s < self._whole_s(1)

    def _whole_s(self, num_steps: int) -> float:
        if self.work.prefill_tokens:
            return self.latency.step_s(*self.work)
        return self.latency.decode_run_s(self.work.decode_seqs, self.work.context_tokens, num_steps)

    def steps_over(self, now: float) -> int:
        """How many steps are over by now."""
        low, high = self.num_told, self.num_steps
        while low < high:
            middle = (low + high + 1) // 2
            if self.began_at + self.seconds(middle) <= now:
                low = middle
            else:
                high = middle - 1
        return low

    def end_after(self, num_steps: int) -> None:
        """Sets the number of steps, and with it the end."""
        self.num_steps = num_steps
        self.ends_at = self.began_at + self.seconds(num_steps)
