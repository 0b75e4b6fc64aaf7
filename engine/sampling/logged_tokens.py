"""The tokens of a step together with what clients want to know about them. Knows no torch, as the worker."""

from __future__ import annotations

from dataclasses import dataclass, field

from core.messages.tokens import TokenLogprobs


@dataclass(slots=True)
class ItemLogprobs:
    """What one item of a step brings.

    Attributes:
        output: Of its new token, if it samples.
        prompt: Of tokens of the prompt, those that follow the ones known before.
    """

    output: TokenLogprobs | None = None
    prompt: list[TokenLogprobs] = field(default_factory=list)


class LoggedTokens(list[int | None]):
    """The new tokens of a step of which somebody wants to know more.

    Attributes:
        logprobs: By index of the item in the step's batch.
    """

    def __init__(self, tokens: list[int | None], logprobs: dict[int, ItemLogprobs]) -> None:
        super().__init__(tokens)
        self.logprobs = logprobs
