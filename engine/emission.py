"""New output of a step for one client, before and after it has become text, and where it waits if it is held back."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from farsight.core.messages.plans import FinishedSequence
from farsight.core.messages.tokens import DeltaLogprobs, TokenDelta, joined
from farsight.engine.sequence import Sequence
from farsight.engine.step_results import LoggedTokens, NoToken


@dataclass(frozen=True, slots=True)
class Output:
    """A delta and the ingress replica whose client it is for."""

    ingress_id: str
    delta: TokenDelta


@dataclass(slots=True)
class Emission:
    """New tokens of one sequence, before they have become text for the client, or why there are none.

    Attributes:
        token_ids: One, and those after it that the step has verified; empty where there is a ``failure``.
        start: Index of the first in the output.
        shown: Their text where that had to be known at once, else None.
        cached_len: As in ``TokenDelta``.
        end: Set if the last of them ends the output.
        logprobs: Log probabilities that the client asked for.
        failure: Why the sequence ends without a new token.
        vector: As in ``TokenDelta``; so is ``state``.
    """

    sequence: Sequence
    token_ids: tuple[int, ...]
    start: int
    shown: str | None
    cached_len: int
    end: FinishedSequence | None = None
    logprobs: DeltaLogprobs | None = None
    failure: NoToken | None = None
    vector: bytes = b""
    state: bytes = b""


def ended_by_prompt(sequence: Sequence, token: int, tokens: list[int | None], index: int) -> Emission:
    """Returns the end of a sequence that generates nothing; the token is kept for the books alone.

    Args:
        tokens: The step's; ``index`` is that of its item.
    """
    assert isinstance(tokens, LoggedTokens), "a runner that ends such a sequence says its vector"
    vector = tokens.pooled.pop(index).plus(sequence.pooled).vector()
    sequence.token_ids.append(token)
    return Emission(sequence, (), 0, "", sequence.cached_len or 0, vector=vector)


class HeldBack:
    """Output of a batch that is held back until the batch is returned together (static execution).

    By sequence, in the order of the steps.
    """

    def __init__(self) -> None:
        self._emissions: dict[str, list[Emission]] = {}

    def add(self, emissions: Iterable[Emission]) -> None:
        for emission in emissions:
            self._emissions.setdefault(emission.sequence.request_id, []).append(emission)

    def take(self, request_id: str) -> list[Emission]:
        """Removes and returns the output of one sequence, which goes out or is no longer wanted."""
        return self._emissions.pop(request_id, [])

    def finish(self, end: FinishedSequence) -> list[Emission]:
        """Returns the output of a sequence that has ended; its own output ended it, maybe many steps ago."""
        emissions = self.take(end.request_id)
        emissions[-1].end = end
        return emissions


def joined_outputs(outputs: Iterable[Output]) -> list[Output]:
    """Joins consecutive deltas of one sequence; an error stays separate, behind the output that came before it."""
    groups = itertools.groupby(outputs, key=_kind)
    return [Output(ingress_id, joined([each.delta for each in group])) for (ingress_id, _, _), group in groups]


def _kind(output: Output) -> tuple[str, str, bool]:
    return output.ingress_id, output.delta.request_id, output.delta.error is None
