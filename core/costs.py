"""What a step costs: the linear model that every policy prices with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from core.messages import StepSample


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step, ``base_s`` plus a share of each kind of work in it (the form of ``StepProfile``).

    Attributes:
        base_s: Of every step, whatever it computes.
        prefill_token_s: Of each prompt token computed.
        decode_seq_s: Of each sequence that decodes.
        context_token_s: Of each token of context that a decoding sequence reads.
    """

    base_s: float
    prefill_token_s: float
    decode_seq_s: float
    context_token_s: float

    def step_s(self, prefill_tokens: int, decode_seqs: int, context_tokens: int) -> float:
        """Seconds of one step."""
        return (
            self.base_s
            + self.prefill_token_s * prefill_tokens
            + self.decode_seq_s * decode_seqs
            + self.context_token_s * context_tokens
        )

    def prefill_s(self, num_tokens: int) -> float:
        """Seconds until so many prompt tokens are computed in a step of their own: the first iteration of a job."""
        return self.step_s(num_tokens, 0, 0)

    def decode_s(self, context_tokens: int) -> float:
        """Seconds of one output token of a sequence that decodes alone."""
        return self.step_s(0, 1, context_tokens)


class CostModel(Protocol):
    """How long a step takes."""

    def step_time_s(self, prefill_tokens: int, decode_seqs: int, context_tokens: int) -> float | None:
        """Seconds; None before anything has been measured."""
        ...

    def observe(self, samples: Sequence[StepSample]) -> None: ...
