"""How many prompt tokens a step may carry beside streams: as many as keep the streams' gaps below a target.

A stream gets one token a step, so its gap is the step's duration. The budget follows from the measured price of steps
and from the streams that run, where other servers take a constant (Agrawal et al., "Taming
Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", OSDI 2024: chosen offline for a model and a device).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from core.costs import StepCost
from core.errors import InvalidValueError
from policies.interfaces import Job

UNBOUNDED = 0
"""No bound but the step's own."""

LEAST_TOKENS = 16
"""Least prompt tokens of a step, so that a prompt always goes on; fewer only where the step itself has no room."""


@dataclass(frozen=True, slots=True)
class StepBudget:
    """Prompt tokens of a step in which sequences decode.

    Prompts lengthen a step to ``max_gap_s`` at most. Where streams alone take more than half of ``max_gap_s``, prompts
    get as much time as the streams take, so that prompts never stand still.

    Attributes:
        max_gap_s: Longest gap between two tokens of a stream that prompts may make; infinity for no budget.

    Raises:
        InvalidValueError: The gap is not positive.
    """

    max_gap_s: float = math.inf

    def __post_init__(self) -> None:
        if not self.max_gap_s > 0:
            raise InvalidValueError("max_gap_s", self.max_gap_s, "seconds > 0 or infinity")

    def prompt_tokens(self, running: Sequence[Job], cost: StepCost | None) -> int:
        """Returns the most prompt tokens of a step of these jobs; ``UNBOUNDED`` without target, streams or price. O(n).

        Args:
            running: Jobs that execute next.
            cost: As measured; None before a measurement.
        """
        if self.max_gap_s == math.inf or cost is None or cost.prefill_token_s <= 0:
            return UNBOUNDED
        num_streams = context_len = start = 0
        for job in running:
            if job.decodes:
                num_streams += 1
                context_len += job.prompt_len + job.output_len
            else:
                start = max(start, job.computed_len)
        if not num_streams:
            return UNBOUNDED
        streams_s = cost.step_s(0, num_streams, context_len)
        left_s = max(self.max_gap_s - streams_s, streams_s)
        return max(LEAST_TOKENS, _tokens_in(left_s, start, cost))


NO_BUDGET = StepBudget()
"""A step carries as many prompt tokens as fit."""


def _tokens_in(seconds: float, start: int, cost: StepCost) -> int:
    """Returns the prompt tokens from position ``start`` on that take ``seconds`` of a step."""
    pair_s = cost.prefill_pair_s
    linear_s = cost.prefill_token_s + pair_s * (start + 0.5)
    # linear n + pair n^2 / 2 = seconds, in the form that also holds for pair = 0
    return math.floor(2 * seconds / (linear_s + math.sqrt(linear_s * linear_s + 2 * pair_s * seconds)))
