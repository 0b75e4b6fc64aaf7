"""A request while an engine has it: its tokens, and the text that a client may see of them.

Two things hold text back: a character whose bytes are incomplete, and a tail that may be the beginning of a stop
string.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from core.errors import InvalidValueError
from core.images import identity_ids
from core.messages.tokens import TokenLogprobs
from core.request import Request, SamplingParams
from engine.pooled_rows import PooledRows
from engine.text.stop_strings import StopStrings
from engine.token_counts import TokenCounts
from engine.vision.spans import ImageInputs, SequenceImages
from kvcache import SequenceState
from policies.speculation.base import Drafter
from tokenization.grammars.compiler import GrammarCompiler
from tokenization.grammars.reasoning import Matcher
from tokenization.grammars.refused import GrammarRefused
from tokenization.text_stream import TextDecoder, TextStream


class Detokenizer:
    """Starts the text of each sequence; one per tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decoder = TextDecoder(tokenizer)
        self.special_ids = self._decoder.special_ids

    def start(
        self, stop: SequenceOf[str] = (), prompt_ids: SequenceOf[int] = (), shown_ids: SequenceOf[int] = ()
    ) -> OutputText:
        """The text of an output that ends before the first of the ``stop`` strings and follows ``prompt_ids``.

        Args:
            shown_ids: Special tokens that are part of the text.
        """
        return OutputText(self._decoder.start(prompt_ids, shown=shown_ids), stop)


class OutputText:
    """The text of one output; ``StopStrings`` says where a stop string ends it."""

    __slots__ = ("_stop", "_stream")

    def __init__(self, stream: TextStream, stop: SequenceOf[str]) -> None:
        self._stream = stream
        self._stop = StopStrings(stop) if stop else None

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._stop is not None and self._stop.stopped

    def push(self, token_id: int, may_stop: bool = True) -> str:
        """Adds a token; returns the text that the client may see now, possibly none.

        Args:
            may_stop: Whether a stop string that this token completes ends the text.
        """
        if self._stop is None:
            return self._stream.push(token_id)
        if self._stop.stopped:
            return ""
        text = self._stream.push(token_id)
        return self._stop.push(text, may_stop) if text else ""

    def flush(self) -> str:
        """The text still held back, when the output has ended; half a character becomes U+FFFD."""
        if self._stop is None:
            return self._stream.flush()
        if self._stop.stopped:
            return ""
        rest = self._stream.flush()
        shown = self._stop.push(rest) if rest else ""
        return shown + self._stop.flush()


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence(SequenceState):
    """The worker's record of a request, with its tokens and its text.

    Attributes:
        token_ids: Prompt and output so far; ``num_tokens`` follows when the step is booked.
        text: What its tokens have become; set before it runs.
        prompt_logprobs: Known log probabilities of the prompt's tokens except the first; None if the client did not
            ask.
        pooled: What its steps have brought of the vector that it asks for in place of tokens.
        block_hashes: Hashes of its first full blocks, as many as were needed so far (``kvcache.block_manager``).
        matcher: Follows its output in its grammar; None without one.
        grammar_problem: Why its grammar cannot be followed; empty if it can.
        images: Those of its prompt; None without, or where the device computes nothing.
        image_problem: Why they cannot be read; empty if they can.
        first_row: Row of the rotary tables that its first position has.
        sampling: As in the request; looked up at every token, as is the next.
        stop_token_ids: Stop tokens of the request.
        drafter: Guesses its next tokens; None while nothing has been guessed for it.
    """

    request: Request
    token_ids: list[int]
    text: OutputText = field(init=False, repr=False)
    prompt_logprobs: list[TokenLogprobs] | None = None
    pooled: PooledRows | None = None
    block_hashes: list[int] = field(default_factory=list)
    drafter: Drafter | None = None
    matcher: Matcher | None = None
    grammar_problem: str = ""
    images: SequenceImages | None = None
    image_problem: str = ""
    first_row: int = 0
    sampling: SamplingParams = field(init=False)
    stop_token_ids: frozenset[int] = field(init=False)
    _named_ids: list[int] = field(init=False, repr=False)
    _counts: TokenCounts | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.sampling = self.request.sampling
        self.stop_token_ids = frozenset(self.sampling.stop_token_ids)
        images = self.request.images
        self._named_ids = list(identity_ids(self.request.prompt_ids, images)) if images else self.token_ids

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
            tenant=request.tenant,
            request=request,
            token_ids=token_ids,
            prompt_logprobs=[] if waits else None,
        )

    def read_images(self, inputs: ImageInputs | None) -> None:
        """Takes the rows of the request's images. What cannot be read fails the sequence at its first token.

        Args:
            inputs: None where the device computes nothing.
        """
        if not self.request.images or inputs is None:
            return
        try:
            self.images = inputs.of(self.request)
        except InvalidValueError as error:
            self.image_problem = str(error)

    @property
    def named_ids(self) -> SequenceOf[int]:
        """What its blocks are named by: its tokens, an image's by the image's content."""
        named = self._named_ids
        if named is not self.token_ids:
            named.extend(self.token_ids[len(named) :])
        return named

    def position(self, index: int) -> int:
        """The position of a token, for the rotary embedding; of an image's, ``SequenceImages.given`` says it."""
        return index if self.images is None else self.images.position(index)

    def follow_grammar(self, grammars: GrammarCompiler | None) -> None:
        """Follows the request's grammar and the budget of its reasoning.

        A grammar that cannot be followed fails the sequence when its first token is due.

        Args:
            grammars: None where the runner follows none.
        """
        if grammars is None:
            self.grammar_problem = "this replica follows no grammars"
            return
        try:
            sampling = self.sampling
            self.matcher = grammars.follow(sampling.grammar, self.request.output_ids, sampling.reasoning)
        except GrammarRefused as refused:
            self.grammar_problem = refused.reason

    def keep_pooled(self, rows: PooledRows) -> None:
        """Adds what a step has brought of the vector."""
        self.pooled = rows.plus(self.pooled)

    def current_matcher(self) -> Matcher | None:
        """The matcher, behind all known tokens of the output; None without one. One thread at a time."""
        matcher = self.matcher
        if matcher is not None:
            matcher.advance(self.token_ids[self.prompt_len + matcher.num_tokens :])
        return matcher

    def token_counts(self) -> TokenCounts:
        """Returns how often it holds each of its known tokens. One thread at a time."""
        if self._counts is None:
            self._counts = TokenCounts(self.token_ids, self.prompt_len)
        self._counts.advance(self.token_ids)
        return self._counts

    def allowed_drafts(self, drafts: SequenceOf[int]) -> SequenceOf[int]:
        """The guessed tokens before the first that the grammar forbids. Between steps."""
        matcher = self.current_matcher()
        return drafts if matcher is None else drafts[: matcher.num_allowed(drafts)]
