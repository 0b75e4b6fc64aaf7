"""PT and DT, the regressions that E2 prices with (Preble, section 2.1), from a step cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from farsight.core.costs import StepCost


@dataclass(frozen=True, slots=True)
class Regressions:
    """How long a request keeps a replica busy.

    Attributes:
        prefill_s: PT: (prompt tokens computed, tokens of context at their end) -> seconds.
        decode_s: DT: (output tokens, tokens of context) -> seconds of all of them; linear in each.
    """

    prefill_s: Callable[[int, int], float]
    decode_s: Callable[[float, float], float]


def from_step_cost(cost: StepCost) -> Regressions:
    """Derives PT and DT from a step cost: PT from tokens and what they attend to, DT from the context each token reads.

    The fixed cost of a step (``base_s``) is no part of DT: the sequences of a batch share this cost, and one sequence
    more does not raise it. Counted for each sequence it would be most of the load, which would then count requests.
    """

    def decode_s(output_len: float, context_len: float) -> float:
        return output_len * (cost.decode_seq_s + cost.context_token_s * context_len)

    return Regressions(lambda new, context: cost.prefill_s(new, context - new), decode_s)
