"""New output of a step for one client, before and after it has become text."""

from __future__ import annotations

from dataclasses import dataclass

from core.messages.plans import FinishedSequence
from core.messages.tokens import DeltaLogprobs, TokenDelta
from engine.sampling.logged_tokens import NoToken
from engine.sequence import Sequence
from engine.text.detokenizer import OutputText


@dataclass(frozen=True, slots=True)
class Output:
    """A delta and the ingress replica whose client it is for."""

    ingress_id: str
    delta: TokenDelta


@dataclass(slots=True)
class Emission:
    """A new token of one sequence, before it has become text for the client, or why there is none.

    Attributes:
        token: None where there is a ``failure``.
        start: Its index in the output.
        shown: Its text where that had to be known at once, else None.
        cached_len: As in ``TokenDelta``.
        end: Set if it was the last token.
        logprobs: Log probabilities that the client asked for.
        failure: Why the sequence ends without a new token.
    """

    sequence: Sequence
    text: OutputText
    token: int | None
    start: int
    shown: str | None
    cached_len: int
    end: FinishedSequence | None = None
    logprobs: DeltaLogprobs | None = None
    failure: NoToken | None = None
