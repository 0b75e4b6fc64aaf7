"""A prompt in two parts, for predictors of its output length, and as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from core.request import PromptSource


@dataclass(frozen=True, slots=True)
class PromptText:
    """What an application says each time, and what is new.

    Attributes:
        instruction: Chat: every message but the last one of the user. Completion: the ``instruction`` of the request,
            or else the first line of the prompt.
        user_input: Chat: the last message of the user. Completion: the rest of the prompt.
        source: All of it; None if no predictor needs it.
    """

    instruction: str
    user_input: str
    source: PromptSource | None = None

    def user_input_len(self, prompt_len: int) -> int:
        """Its share of the prompt's tokens, by characters: tokenising it alone would cost as much as the prompt."""
        num_chars = len(self.instruction) + len(self.user_input)
        return round(prompt_len * len(self.user_input) / num_chars) if num_chars else 0


def of_chat(messages: Sequence[Mapping[str, str]]) -> PromptText:
    """A conversation without a user is all instruction."""
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
    others = [message["content"] for i, message in enumerate(messages) if i != last]
    source = PromptSource(messages=tuple((message["role"], message["content"]) for message in messages))
    return PromptText("\n".join(others), "" if last is None else messages[last]["content"], source)


def of_completion(prompt: str, instruction: str | None) -> PromptText:
    """An instruction that the prompt begins with is not its user input as well; one of a single line is all input."""
    source = PromptSource(prompt)
    if instruction is not None:
        return PromptText(instruction, prompt.removeprefix(instruction).lstrip(), source)
    first, line_end, rest = prompt.partition("\n")
    return PromptText(first, rest, source) if line_end else PromptText("", prompt, source)
