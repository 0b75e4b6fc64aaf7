"""How long a step may take before its worker counts as hung."""

from __future__ import annotations

from collections import deque

from core.messages.step_times import StepSample
from estimator.step_profile import StepProfile

MOST_TIMES = 20.0
"""So many times its price a step may take, and a fixed time on top."""

FIRST_STEPS_S = 600.0
"""What a step may take while nothing is known of prices: kernels may be compiled in the first ones."""


MAX_SAMPLES = 64
"""Steps that are remembered until the next one is to be bounded, which is when they are learned from."""


class StepBounds:
    """Learns what this worker's steps take, and bounds those to come.

    Args:
        stall_s: The fixed time.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._profile = StepProfile()
        self._samples: deque[StepSample] = deque(maxlen=MAX_SAMPLES)

    def add(self, sample: StepSample) -> None:
        """A step has ended."""
        self._samples.append(sample)

    def bound_s(self, step: StepSample | None) -> float:
        """For a step with this work, whatever duration it says; None for what is done between two steps."""
        if step is None:
            return self._stall_s
        self._profile.observe(self._samples)
        self._samples.clear()
        price_s = self._profile.step_time_s(
            step.prefill_tokens, step.decode_seqs, step.context_tokens, step.prefill_pairs
        )
        return max(FIRST_STEPS_S, self._stall_s) if price_s is None else self._stall_s + MOST_TIMES * price_s
