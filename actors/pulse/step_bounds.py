"""Bounds the time that a step may take before its worker counts as hung."""

from __future__ import annotations

from collections import deque

from core.messages.step_times import StepSample
from estimator.step_profile import StepProfile

MOST_TIMES = 20.0
"""A step may take so many times its predicted seconds, plus a fixed time."""

FIRST_STEPS_S = 600.0
"""Seconds that a step may take while step costs are unknown: the first steps may compile kernels."""


MAX_SAMPLES = 64
"""Most measured steps that are kept until the next call of ``bound_s``, which learns from them."""


class StepBounds:
    """Learns the durations of this worker's steps, and bounds the next ones.

    Args:
        stall_s: The fixed time in seconds.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._profile = StepProfile()
        self._samples: deque[StepSample] = deque(maxlen=MAX_SAMPLES)

    def add(self, sample: StepSample) -> None:
        """Adds a measured step."""
        self._samples.append(sample)

    def bound_s(self, step: StepSample | None) -> float:
        """Bound in seconds of a step with this work; None for the work between two steps.

        The duration in ``step`` is not used.
        """
        if step is None:
            return self._stall_s
        self._profile.observe(self._samples)
        self._samples.clear()
        price_s = self._profile.step_time_s(
            step.prefill_tokens, step.decode_seqs, step.context_tokens, step.prefill_pairs
        )
        return max(FIRST_STEPS_S, self._stall_s) if price_s is None else self._stall_s + MOST_TIMES * price_s
