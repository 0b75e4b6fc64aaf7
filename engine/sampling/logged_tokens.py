"""The tokens of a step together with what else it says of its sequences. Knows no torch, as the worker."""

from __future__ import annotations

from dataclasses import dataclass, field

from core.messages.tokens import TokenLogprobs
from core.request import Fault


@dataclass(slots=True)
class ItemLogprobs:
    """What one item of a step brings.

    Attributes:
        output: Of its new token, if it samples.
        prompt: Of tokens of the prompt, those that follow the ones known before.
    """

    output: TokenLogprobs | None = None
    prompt: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class NoToken:
    """Why an item that samples has no new token: its sequence cannot go on, the others of the step can.

    Attributes:
        reason: For its client to read.
        fault: The request's own or the model's.
    """

    reason: str
    fault: Fault


class LoggedTokens(list[int | None]):
    """The new tokens of a step that says more of some of its items.

    Attributes:
        logprobs: By index of the item in the step's batch.
        failures: Likewise, of items that should have got a token and have None.
    """

    def __init__(
        self,
        tokens: list[int | None],
        logprobs: dict[int, ItemLogprobs],
        failures: dict[int, NoToken] | None = None,
    ) -> None:
        super().__init__(tokens)
        self.logprobs = logprobs
        self.failures = failures or {}
