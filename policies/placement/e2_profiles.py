"""PT and DT, the regressions that E2 prices with (Preble, section 2.1): from a step cost, or those of the authors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from farsight.core.costs import StepCost

INITIAL_TPOT_S = 0.15
"""Seconds an output token in the authors' implementation, before it has measured any."""


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


def _mistral_7b_a6000(new: int, context: int) -> float:
    """Returns PT with the constants of the authors' implementation (WukLab/preble), which are in milliseconds.

    The authors halve the attention term where few of the KV entries are unique; here all entries count as unique.
    """
    if new >= 384:
        linear = 0.10842571 * new + 4.2098
    elif new >= 192:
        linear = -118 + 1.25 * new - 2.56e-3 * new**2
    else:
        linear = 22.0
    attention = 0.32 if context <= 1024 else 1.86e-4 * context + 0.159
    quadratic = 0.0
    if new * context > 2**20:
        quadratic = 1.13e-3 * new + 1.75e-3 * context + 2.19e-6 * new * context
    return (linear + attention + quadratic) / 0.9 * 1e-3


def _llama_3_70b_a100(new: int, context: int) -> float:
    return (28.931 + 0.18223 * new + 4.0037e-3 * context + 2.5505e-6 * new * context) * 1e-3


def _llama_3_70b_h100(new: int, context: int) -> float:
    return (18.667 + 0.07988 * new + 2.6853e-3 * context + 7.444e-7 * new * context) * 1e-3


def _initial_decode_s(output_len: float, context_len: float) -> float:
    return INITIAL_TPOT_S * output_len


MISTRAL_7B_A6000 = Regressions(_mistral_7b_a6000, _initial_decode_s)
LLAMA_3_70B_A100_TP2 = Regressions(_llama_3_70b_a100, _initial_decode_s)
LLAMA_3_70B_H100_TP2 = Regressions(_llama_3_70b_h100, _initial_decode_s)
