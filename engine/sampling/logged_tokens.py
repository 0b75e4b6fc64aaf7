"""The tokens of a step, with what more some of its sequences have got of it. Imports no torch, as the worker."""

from __future__ import annotations

from dataclasses import dataclass, field

from core.messages.tokens import TokenLogprobs
from core.request import Fault
from engine.pooled_rows import PooledRows


@dataclass(slots=True)
class ItemLogprobs:
    """Log probabilities that one item of a step brings.

    Attributes:
        output: Log probabilities of its new token, if it samples.
        prompt: Log probabilities of the next tokens of the prompt, after those known before.
    """

    output: TokenLogprobs | None = None
    prompt: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class NoToken:
    """Why an item that samples has no new token: its sequence cannot go on, the others of the step can.

    Attributes:
        reason: Explanation for its client.
        fault: Whether the request or the model is the cause.
    """

    reason: str
    fault: Fault


class LoggedTokens(list[int | None]):
    """The new tokens of a step, with more about some of its items.

    Attributes:
        logprobs: By index of the item in the step's batch.
        failures: Likewise, for items that should have got a token and have None.
        further: Likewise, the tokens after the first of items whose drafts turned out right.
        pooled: Likewise, for items of requests that generate nothing; the token of such an item means nothing.
    """

    def __init__(
        self,
        tokens: list[int | None],
        logprobs: dict[int, ItemLogprobs],
        failures: dict[int, NoToken] | None = None,
        further: dict[int, list[int]] | None = None,
        pooled: dict[int, PooledRows] | None = None,
    ) -> None:
        super().__init__(tokens)
        self.logprobs = logprobs
        self.failures = failures or {}
        self.further = further or {}
        self.pooled = pooled or {}

    @property
    def tells_more(self) -> bool:
        """Whether there is more than one token or none for each item."""
        return bool(self.logprobs or self.failures or self.further or self.pooled)
