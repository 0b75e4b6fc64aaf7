"""A request while an engine has it."""

from __future__ import annotations

from dataclasses import dataclass, field

from core.messages.tokens import TokenLogprobs
from core.request import Request, SamplingParams
from engine.text.detokenizer import OutputText
from kvcache import SequenceState


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence(SequenceState):
    """The worker's record of a request, with its tokens and its text.

    Attributes:
        token_ids: Prompt and output so far; ``num_tokens`` follows when the step is booked.
        text: What its tokens have become; set before it runs.
        prompt_logprobs: Known log probabilities of the prompt's tokens except the first; None if the client did not
            ask.
        block_hashes: Hashes of its first full blocks, as many as were needed so far (``kvcache.prefix``).
        sampling: As in the request; looked up at every token, as is the next.
        stop_token_ids: Stop tokens of the request.
    """

    request: Request
    token_ids: list[int]
    text: OutputText = field(init=False, repr=False)
    prompt_logprobs: list[TokenLogprobs] | None = None
    block_hashes: list[int] = field(default_factory=list)
    sampling: SamplingParams = field(init=False)
    stop_token_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.sampling = self.request.sampling
        self.stop_token_ids = frozenset(self.sampling.stop_token_ids)

    @classmethod
    def of(cls, request: Request) -> Sequence:
        """A sequence as its attempt begins it."""
        # A client that has got output has got what comes with its first token.
        waits = request.sampling.prompt_logprobs and not request.output_ids
        token_ids = [*request.prompt_ids, *request.output_ids]
        return cls(
            request.request_id,
            request.attempt,
            request.prompt_len,
            request.max_total_len,
            len(token_ids),
            request=request,
            token_ids=token_ids,
            prompt_logprobs=[] if waits else None,
        )
