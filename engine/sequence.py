"""The token state of a request while an engine holds it."""

from __future__ import annotations

from dataclasses import dataclass, field

from core.messages.tokens import TokenLogprobs
from core.request import Request, SamplingParams


@dataclass(slots=True)
class Sequence:
    """A request and its tokens.

    Attributes:
        token_ids: Prompt and output so far.
        prompt_logprobs: Known log probabilities of the prompt's tokens except the first; None if the client did not
            ask.
        block_hashes: Hashes of its first full blocks, as many as were needed so far (``kvcache.prefix``).
        stop_token_ids: Stop tokens of the request, looked up at every token.
    """

    request: Request
    token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs] | None = None
    block_hashes: list[int] = field(default_factory=list)
    stop_token_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.stop_token_ids = frozenset(self.sampling.stop_token_ids)

    @classmethod
    def of(cls, request: Request) -> Sequence:
        """A sequence as its attempt begins it."""
        # A client that has got output has got what comes with its first token.
        waits = request.sampling.prompt_logprobs and not request.output_ids
        return cls(request, [*request.prompt_ids, *request.output_ids], [] if waits else None)

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def prompt_len(self) -> int:
        return self.request.prompt_len

    @property
    def output_len(self) -> int:
        return len(self.token_ids) - self.request.prompt_len

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.request.prompt_len :]
