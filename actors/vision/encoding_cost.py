"""The time that a vision tower takes, learned from its batches: the vision term of a request's cost."""

from __future__ import annotations

from collections.abc import Sequence

from actors.worker.step_loop import FIRST_STEPS_S, MOST_TIMES
from core.messages.step_times import StepSample
from estimator.step_profile import MIN_SAMPLES, StepProfile

TERMS = ("batch", "token", "pair")
"""Names of the coefficients: seconds of a batch, of each token, and of each pair of tokens of one picture."""


class EncodingCost:
    """Predicts the seconds of a batch from the tokens of its pictures; fitted like the costs of steps.

    Args:
        stall_s: Seconds that a batch may take in addition to ``MOST_TIMES`` times its predicted seconds.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._profile = StepProfile()

    def add(self, tokens: Sequence[int], seconds: float) -> None:
        """Adds a measured batch: the tokens of each picture, and seconds."""
        self._profile.observe((_sample(tokens, seconds),))

    def batch_s(self, tokens: Sequence[int]) -> float | None:
        """Predicts the seconds of a batch; None until enough batches were measured."""
        if self._profile.num_samples < MIN_SAMPLES:
            return None
        batch_s, token_s, pair_s = self.coefficients()
        return batch_s + token_s * sum(tokens) + pair_s * _pairs(tokens)

    def bound_s(self, tokens: Sequence[int]) -> float:
        """Returns the seconds after which a batch counts as hung."""
        expected_s = self.batch_s(tokens)
        return max(FIRST_STEPS_S, self._stall_s) if expected_s is None else self._stall_s + MOST_TIMES * expected_s

    def coefficients(self) -> tuple[float, float, float]:
        """Returns the coefficients in the order of ``TERMS``, in seconds; 0 where unknown."""
        batch_s, token_s, _, _, pair_s = self._profile.coefficients()
        return batch_s, token_s, pair_s


def _sample(tokens: Sequence[int], seconds: float) -> StepSample:
    return StepSample(sum(tokens), 0, 0, seconds, _pairs(tokens))


def _pairs(tokens: Sequence[int]) -> int:
    """Counts pairs of tokens of one picture: a tower attends within a picture only."""
    return sum(each * each for each in tokens)
