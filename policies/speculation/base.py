"""The interface of parts that guess tokens, which the steps of a worker verify, and their table.

A step computes guesses as further rows of a sequence. A guess that turns out right saves the sequence a step; one that
turns out wrong has cost a row. Outputs do not depend on guesses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from policies.parts import Parts


class Drafter(ABC):
    """Guesses the next tokens of one request."""

    @abstractmethod
    def draft(self, token_ids: Sequence[int], price: float) -> Sequence[int]:
        """Guesses that are worth their price, in order, perhaps none. Asked before each step that decodes the request.

        Args:
            token_ids: Prompt and output so far. They show what became of the guesses before.
            price: As ``Speculation.price`` has it for the step.
        """


class Speculation(ABC):
    """Guesses tokens for the requests of one worker, and measures what it costs to verify them."""

    @abstractmethod
    def open(self) -> Drafter:
        """What guesses for a request from now on."""

    @abstractmethod
    def price(self, num_seqs: int) -> float:
        """What a guessed token costs in a step that decodes so many sequences: in tokens that would have come instead.

        A guess is worth it if it is right with a higher probability. Infinity: nothing is to be guessed in this step.
        """

    @abstractmethod
    def observe(self, num_seqs: int, num_drafts: int, duration_s: float) -> None:
        """A step that decoded ``num_seqs`` sequences and verified ``num_drafts`` guesses took so many seconds."""

    @abstractmethod
    def tokens(self, num_seqs: int, seconds: float) -> float:
        """Tokens that steps of so many sequences bring in so many seconds; 0 while no such step was measured."""


@dataclass(frozen=True, slots=True)
class SpeculationContext:
    """What a part that guesses tokens is built from: nothing yet."""


SPECULATIONS: Parts[Speculation, SpeculationContext] = Parts("engine.speculation")
"""Parts that guess tokens, by the names that ``[engine] speculation`` uses."""
