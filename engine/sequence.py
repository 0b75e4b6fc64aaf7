"""A request while an engine has it: its tokens, their counts, and the text that a client may see of them.

Two things hold text back: a character whose bytes are incomplete, and a tail that may be the beginning of a stop
string.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from farsight.core.errors import InvalidValueError
from farsight.core.images import identity_ids
from farsight.core.messages.tokens import TokenLogprobs
from farsight.core.request import Request, SamplingParams
from farsight.engine.step_results import PooledRows
from farsight.engine.vision.spans import ImageInputs, SequenceImages
from farsight.kvcache import SequenceState
from farsight.policies.speculation.base import Drafter
from farsight.tokenization.grammars.problems import GrammarRefused
from farsight.tokenization.grammars.reasoning import Matcher
from farsight.tokenization.text_stream import TextDecoder, TextStream

if TYPE_CHECKING:  # needs llguidance, which a machine with a GPU alone may lack
    from farsight.tokenization.grammars.compiler import GrammarCompiler


class StopStrings:
    """Holds back the end of a text while it may be the beginning of a stop string.

    The stop string that is complete first ends the text (of those complete at the same character the longest), so
    the result does not depend on how the text is cut into parts.

    Attributes:
        stopped: Whether a stop string has ended the text.
    """

    def __init__(self, stop: SequenceOf[str]) -> None:
        self._matches = [_Match(each) for each in stop]
        self._held: deque[str] = deque()
        self._num_held = 0
        self.stopped = False

    def push(self, text: str, may_stop: bool = True) -> str:
        """Adds text; returns the text that the client may see now.

        Args:
            may_stop: Whether a stop string that is completed within ``text`` ends it.
        """
        for index, char in enumerate(text):
            longest = 0
            for match in self._matches:
                longest = max(longest, match.advance(char))
            if longest and may_stop:
                self.stopped = True
                return self._release(text[: index + 1], longest)
        return self._release(text, max(match.length for match in self._matches))

    def flush(self) -> str:
        """Returns the text held back, when the text has ended."""
        return "" if self.stopped else self._release("", 0)

    def _release(self, text: str, num_kept: int) -> str:
        """Returns the held text and ``text``, without the last characters, which stay held."""
        if text:
            self._held.append(text)
            self._num_held += len(text)
        shown = []
        while self._num_held > num_kept:
            part = self._held.popleft()
            excess = self._num_held - num_kept
            if len(part) > excess:
                self._held.appendleft(part[excess:])
                part = part[:excess]
            shown.append(part)
            self._num_held -= len(part)
        return "".join(shown)


class _Match:
    """How much of one stop string the text ends with: the automaton of Knuth, Morris and Pratt, built as it is needed.

    Attributes:
        length: Characters of the stop string that the text ends with, fewer than all of them.
    """

    __slots__ = ("_borders", "_stop", "length")

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._borders = [0]  # by length - 1: longest proper suffix of that prefix that is a prefix too
        self.length = 0

    def advance(self, char: str) -> int:
        """Returns the length of the stop string if it is complete with this character, else 0."""
        length = self._next(self.length, char)
        if length == len(self._stop):
            self.length = self._border(length)
            return length
        self.length = length
        return 0

    def _next(self, length: int, char: str) -> int:
        stop = self._stop
        while length and stop[length] != char:
            length = self._border(length)
        return length + 1 if stop[length] == char else 0

    def _border(self, length: int) -> int:
        borders = self._borders
        while len(borders) < length:
            borders.append(self._next(borders[-1], self._stop[len(borders)]))
        return borders[length - 1]


class Detokenizer:
    """Starts the text of each sequence; one per tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decoder = TextDecoder(tokenizer)
        self.special_ids = self._decoder.special_ids

    def start(
        self, stop: SequenceOf[str] = (), prompt_ids: SequenceOf[int] = (), shown_ids: SequenceOf[int] = ()
    ) -> OutputText:
        """Returns the text of an output that ends before the first of the ``stop`` strings and follows ``prompt_ids``.

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
        """Returns the text still held back, when the output has ended; half a character becomes U+FFFD."""
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
        """Returns a sequence as its attempt begins it."""
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
            shares=not request.sampling.computes_prompt,
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
            self.image_problem, self.shares = str(error), False

    @property
    def named_ids(self) -> SequenceOf[int]:
        """What its blocks are named by: its tokens, an image's by the image's content."""
        named = self._named_ids
        if named is not self.token_ids:
            named.extend(self.token_ids[len(named) :])
        return named

    def position(self, index: int) -> int:
        """Returns the position of a token, for the rotary embedding; of an image's, ``SequenceImages.given`` has it."""
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

    def current_matcher(self) -> Matcher | None:
        """Returns the matcher, behind all known tokens of the output; None without one. One thread at a time."""
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
        """Returns the guessed tokens before the first that the grammar forbids. Between steps."""
        matcher = self.current_matcher()
        return drafts if matcher is None else drafts[: matcher.num_allowed(drafts)]


@dataclass(frozen=True, slots=True)
class LongSequences:
    """Which sequences are turned by the long factors, where that is chosen by request.

    Attributes:
        original_len: Tokens, prompt and output together, above which they are.
        first_row: Row of the rotary tables that their first position has.
    """

    original_len: int
    first_row: int


class TokenCounts:
    """The tokens of a prompt and of the output so far, each once.

    Attributes:
        num_tokens: Tokens that are counted.
    """

    def __init__(self, token_ids: SequenceOf[int], prompt_len: int) -> None:
        self._ids = np.unique(np.array(token_ids[:prompt_len], dtype=np.int32))
        self._counts = np.zeros(len(self._ids), dtype=np.int32)
        self._places = {token: place for place, token in enumerate(self._ids.tolist())}
        self.num_tokens = min(prompt_len, len(token_ids))
        self.advance(token_ids)

    @property
    def ids(self) -> NDArray[np.int32]:
        """Ids of the tokens."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> NDArray[np.int32]:
        """How often the output holds each; 0 for those of the prompt alone."""
        return self._counts[: len(self._places)]

    def advance(self, token_ids: SequenceOf[int]) -> None:
        """Counts the tokens that have come.

        Args:
            token_ids: All of them: those counted before, then the new ones.
        """
        places = self._places
        for token in token_ids[self.num_tokens :]:
            place = places.setdefault(token, len(places))
            if place == len(self._ids):
                self._grow()
            self._ids[place] = token
            self._counts[place] += 1
        self.num_tokens = len(token_ids)

    def plus(self, token_ids: SequenceOf[int]) -> TokenCounts:
        """Returns the counts with further tokens of the output; these stay as they are."""
        more = TokenCounts((), 0)
        more._ids, more._counts, more._places = self.ids.copy(), self.counts.copy(), dict(self._places)
        more.advance(token_ids)
        more.num_tokens = self.num_tokens + len(token_ids)
        return more

    def _grow(self) -> None:
        size = max(16, 2 * len(self._ids))
        for name in ("_ids", "_counts"):
            values = getattr(self, name)
            setattr(self, name, np.concatenate([values, np.zeros(size - len(values), dtype=np.int32)]))
