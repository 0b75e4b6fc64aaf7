"""What the HTTP layer hands from floor to floor: what one body asks for, and what came out of its requests."""

from __future__ import annotations

import dataclasses
import hashlib
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from farsight.core.forecast import NO_CALL, CallForm
from farsight.core.images import ImageFile
from farsight.core.messages.tokens import TokenDelta, TokenLogprobs
from farsight.core.request import Origin, PromptSource, Request, SamplingParams
from farsight.tokenization.text_stream import TextDecoder
from farsight.tokenization.tool_formats.parts import OutputForm

GPU_SECONDS_DIGITS = 6
"""Decimals of GPU-seconds in answers: microseconds."""


@dataclass(frozen=True, slots=True)
class PromptText:
    """What an application says each time, and what is new.

    Attributes:
        instruction: Chat: every message but the last one of the user. Completion: the ``instruction`` of the request,
            or else the first line of the prompt.
        user_input: Chat: the last message of the user. Completion: the rest of the prompt.
        source: All of it; None if no predictor needs it.
        call: Who calls, and how.
    """

    instruction: str
    user_input: str
    source: PromptSource | None = None
    call: CallForm = NO_CALL

    def sent_by(self, name: str) -> PromptText:
        """Returns the same text with a client that also goes by this name: its API key, or its ``user``."""
        if not name:
            return self
        named = hashlib.blake2b(f"{self.call.client}\0{name}".encode("utf-8", "replace"), digest_size=8)
        return dataclasses.replace(self, call=dataclasses.replace(self.call, client=named.hexdigest()))

    def user_input_len(self, text_len: int) -> int:
        """Estimates its share of the text's tokens by characters: tokenising it alone costs as much as the prompt."""
        num_chars = len(self.instruction) + len(self.user_input)
        return round(text_len * len(self.user_input) / num_chars) if num_chars else 0


@dataclass(frozen=True, slots=True)
class Echo:
    """
    Attributes:
        offsets: By token of the prompt, the character of ``text`` that it begins with.
    """

    text: str
    offsets: tuple[int, ...] = ()

    @classmethod
    def of_tokens(cls, decoder: TextDecoder, token_ids: Sequence[int]) -> Echo:
        """Shows all tokens as text; a token that completes no character has the offset of the next one."""
        stream = decoder.start(shows_special=True)
        texts, offsets, reached = [], [], 0
        for token_id in token_ids:
            offsets.append(reached)
            texts.append(stream.push(token_id))
            reached += len(texts[-1])
        return cls("".join([*texts, stream.flush()]), tuple(offsets))


@dataclass(frozen=True, slots=True)
class BeamParams:
    """
    Attributes:
        num_beams: Outputs that are kept from token to token, and returned.
        length_penalty: The sum of an output's log probabilities is divided by its length to this power.
        ignore_eos: Whether an end-of-sequence token is one like any other.
    """

    num_beams: int
    length_penalty: float = 1.0
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Generation:
    """What one HTTP body asks for: its requests, and which results the client gets in which form.

    Attributes:
        prompts: A request for each prompt, without a name; ``named`` makes ``num_tries`` of each.
        texts: The prompts as text; None where a prompt came as token ids.
        model: As the client names it.
        chat: Whether this is a chat, and not a completion.
        num_tries: Outputs run for each prompt.
        n: Choices returned for each prompt: the most likely of its outputs.
        stream, include_usage: Whether the answer is a stream, and whether that says its usage.
        shows_logprobs: Whether the client gets log probabilities; they are also computed to rank ``best_of`` outputs.
        num_logprobs: Likeliest tokens that are shown beside each token of an output.
        num_prompt_logprobs: The same for the tokens of the prompt, which are shown apart; None for nothing.
        shows_token_ids: Whether the client gets the token ids of prompt and output.
        names_ids: Whether log probabilities name tokens by their ids.
        continuous_usage: Whether every chunk says the usage so far.
        echoes: The text put before the outputs of each prompt; empty where there is none.
        prompt_only: The client asked for 0 tokens; the one token that every request yields is not returned.
        beams: The search for its outputs; None where they are drawn.
        service_tier: Tier that serves it; empty where the client names none.
        response_id: The id of the client's answer.
        id_prefix: What that id begins with; empty for what its kind has.
        pictures: Files of the pictures of its one prompt, whose places hold one token each until they are encoded.
        limit_field: The field that limits its output; empty where the context does.
        form: What its outputs may hold beside text; None for nothing.
        requests: ``num_tries`` of the first prompt, then those of the second, and so on; empty before ``named``.
    """

    prompts: tuple[Request, ...]
    texts: tuple[PromptText | None, ...]
    model: str
    chat: bool
    num_tries: int = 1
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    shows_logprobs: bool = False
    num_logprobs: int = 0
    num_prompt_logprobs: int | None = None
    shows_token_ids: bool = False
    names_ids: bool = False
    continuous_usage: bool = False
    echoes: tuple[Echo, ...] = ()
    prompt_only: bool = False
    beams: BeamParams | None = None
    service_tier: str = ""
    response_id: str = ""
    id_prefix: str = ""
    form: OutputForm | None = None
    requests: tuple[Request, ...] = ()
    pictures: tuple[ImageFile, ...] = ()
    limit_field: str = ""

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens, each prompt counted once whatever its number of choices."""
        return sum(request.prompt_len for request in self.prompts)

    def named(
        self, owner: bytes, salt: Callable[[str], str], reading_rate: float | None = None, response_id: str = ""
    ) -> Generation:
        """Adds the requests that run, under an id of the client's answer: a new one where none is given.

        Each try of a prompt has the next seed, so that a choice does not depend on the number of choices.

        Args:
            owner: As ``Origin.owner``.
            salt: From a request's own cache salt to the one that it is run with.
            reading_rate: As in ``Request``.
        """
        prefix = self.id_prefix or ("chatcmpl-" if self.chat else "cmpl-")
        response_id = response_id or f"{prefix}{uuid.uuid4().hex}"
        tries = [(prompt, number) for prompt in self.prompts for number in range(self.num_tries)]
        requests = tuple(
            dataclasses.replace(
                prompt,
                sampling=_with_next_seed(prompt.sampling, number),
                origin=Origin(response_id, choice, owner),
                cache_salt=salt(prompt.cache_salt),
                reading_rate=reading_rate,
            )
            for choice, (prompt, number) in enumerate(tries)
        )
        return dataclasses.replace(self, requests=requests, response_id=response_id)

    def in_trace(self, traceparent: str) -> Generation:
        """Names the trace of its requests to the servers that they are passed on to."""
        return dataclasses.replace(self, requests=tuple(_in_trace(each, traceparent) for each in self.requests))


def _in_trace(request: Request, traceparent: str) -> Request:
    if request.origin is None:
        return request
    return dataclasses.replace(request, origin=dataclasses.replace(request.origin, traceparent=traceparent))


def _with_next_seed(sampling: SamplingParams, number: int) -> SamplingParams:
    return dataclasses.replace(sampling, seed=(sampling.seed + number) % 2**64) if number else sampling


@dataclass(slots=True)
class ChoiceResult:
    """The output of one request so far.

    Attributes:
        cached_len: Prompt tokens whose KV came from the prefix cache.
        gpu_s: GPU-seconds that it took.
    """

    texts: list[str] = field(default_factory=list)
    num_tokens: int = 0
    finish_reason: str | None = None
    cached_len: int = 0
    gpu_s: float = 0.0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    token_ids: list[int] = field(default_factory=list)

    def add(self, delta: TokenDelta) -> None:
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.num_tokens += delta.num_tokens
        self.finish_reason = delta.finish_reason
        self.cached_len += first_cached_len(delta)
        self.gpu_s += delta.gpu_s
        if delta.logprobs is not None:
            self.logprobs += delta.logprobs.output
            self.prompt_logprobs += delta.logprobs.prompt

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def likelihood(self) -> float:
        """Mean log probability of a token."""
        return sum(values[0] for _, values in self.logprobs) / max(len(self.logprobs), 1)


def first_cached_len(delta: TokenDelta) -> int:
    """Returns the cached prompt tokens that a delta adds; a resumed attempt adds none: its first one did.

    An external server reports them with the last delta, which has no token ids.
    """
    return delta.cached_len if delta.start == 0 or not delta.token_ids else 0


@dataclass(slots=True)
class Used:
    """Output tokens, cached prompt tokens and GPU-seconds of an answer so far."""

    generation: Generation
    num_tokens: int = 0
    num_cached: int = 0
    gpu_s: float = 0.0

    def add(self, index: int, delta: TokenDelta) -> None:
        """Counts an output; a prompt's cached tokens are those of its first try."""
        self.num_tokens += delta.num_tokens
        self.gpu_s += delta.gpu_s
        if delta.cached_len and index % self.generation.num_tries == 0:
            self.num_cached += first_cached_len(delta)


def shown_choices(generation: Generation, results: Sequence[ChoiceResult]) -> list[ChoiceResult]:
    """Returns the ``n`` likeliest outputs of each prompt, best first; unsorted if each prompt has only ``n``."""
    tries, n = generation.num_tries, generation.n
    if tries == n:
        return list(results)
    shown = []
    for first in range(0, len(results), tries):
        shown += sorted(results[first : first + tries], key=lambda result: -result.likelihood)[:n]
    return shown
