"""The token state of a request while an engine holds it."""

from __future__ import annotations

from dataclasses import dataclass, field

from core.request import Request, SamplingParams


@dataclass(slots=True)
class Sequence:
    """A request and its tokens.

    Attributes:
        token_ids: Prompt and output so far.
        block_hashes: Of its first full blocks, as many as were asked for so far (``kvcache.prefix``).
    """

    request: Request
    token_ids: list[int]
    block_hashes: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, request: Request) -> Sequence:
        """A sequence as its attempt begins it."""
        return cls(request, [*request.prompt_ids, *request.output_ids])

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
