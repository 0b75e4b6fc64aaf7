"""The interface of parts that guess tokens, which the steps of a worker verify, and their table.

A step computes guesses as further rows of a sequence. A right guess saves the sequence a step; a wrong guess has cost a
row. Outputs do not depend on guesses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from farsight.policies.parts import Parts


class Drafter(ABC):
    """Guesses the next tokens of one request."""

    @abstractmethod
    def draft(self, token_ids: Sequence[int], price: float) -> Sequence[int]:
        """Returns guesses worth their price, in order, perhaps none. Called before each step that decodes the request.

        Args:
            token_ids: Prompt and output so far; they also show which earlier guesses were right.
            price: ``Speculation.price`` of the step.
        """


class Speculation(ABC):
    """Guesses tokens for the requests of one worker, and measures what it costs to verify them."""

    @abstractmethod
    def open(self) -> Drafter:
        """Makes the drafter of a request."""

    @abstractmethod
    def price(self, num_seqs: int) -> float:
        """Returns the price of a guessed token in a step of ``num_seqs`` sequences, in tokens that it displaces.

        A guess is worth its price if it is right with a higher probability. Infinity: no guesses in this step.
        """

    @abstractmethod
    def observe(self, num_seqs: int, num_drafts: int, duration_s: float) -> None:
        """Books the seconds of a step that decoded ``num_seqs`` sequences and verified ``num_drafts`` guesses."""

    @abstractmethod
    def tokens(self, num_seqs: int, seconds: float) -> float:
        """Returns the tokens that steps of ``num_seqs`` sequences bring in this time; 0 before one was measured."""


@dataclass(frozen=True, slots=True)
class SpeculationContext:
    """What a part that guesses tokens is built from: nothing yet."""


SPECULATIONS: Parts[Speculation, SpeculationContext] = Parts("engine.speculation")
"""Parts that guess tokens, by the names that ``[engine] speculation`` uses."""
