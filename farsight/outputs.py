"""What ``LLM`` returns, under the names that vLLM has for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model wants to be made.

    Attributes:
        arguments: A JSON object, as text.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One output.

    Attributes:
        index: Its place among the outputs of its prompt.
        text: Without reasoning and calls of tools.
        finish_reason: ``stop``, ``length`` or ``tool_calls``; None while it goes on.
        logprobs: As the API shows them, by tokens; None where none were asked for.
        reasoning: What the model thought before it answered; empty for nothing.
        tool_calls: Calls of the tools that were offered.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    logprobs: Any = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All outputs of one prompt.

    Attributes:
        request_id: What ``LLM.explain`` takes.
        prompt: Text of the prompt; None for token ids, and for a chat.
        finished: Whether every output has ended.
        num_cached_tokens: Prompt tokens that were found in the prefix cache.
        eta_s: Seconds from the request by which it ends with probability 0.5 and 0.9; None while unknown.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool = True
    num_cached_tokens: int = 0
    prompt_logprobs: Any = None
    eta_s: tuple[float, float] | None = None

    @property
    def text(self) -> str:
        """The text of the first output."""
        return self.outputs[0].text

    @property
    def num_tokens(self) -> int:
        """Tokens of all outputs."""
        return sum(len(output.token_ids) for output in self.outputs)


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A vector, as long as the model's embeddings or as was asked for."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """The vector of one text."""

    outputs: EmbeddingOutput
    num_prompt_tokens: int
