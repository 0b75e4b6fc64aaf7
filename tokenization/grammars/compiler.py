"""Compiles grammars for one tokenizer, within bounds of time and memory, and follows them token by token."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer

from farsight.core.request import ReasoningBudget
from farsight.tokenization.grammars.problems import GrammarRefused, plain
from farsight.tokenization.grammars.reasoning import AnyText, BudgetMatcher, Matcher
from farsight.tokenization.text_stream import TokenBytes, special_ids

LIMITS = LLParserLimits(
    max_items_in_row=1000,
    initial_lexer_fuel=500_000,  # about 10 ms
    step_lexer_fuel=100_000,  # about 7 ms for the worst token
    step_max_items=20_000,  # about 1 ms
    max_lexer_states=20_000,  # about 40 MB
    max_grammar_size=100_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)
"""What one grammar may cost. Their times are those that ``llguidance`` documents."""

MAX_COMPILED = 32
"""Compiled grammars that are kept for further requests."""


@functools.lru_cache(maxsize=256)
def problem_of(grammar: str) -> str:
    """Why a grammar cannot be compiled, is too large or has no text at all; empty if it can be used.

    It is tried with a vocabulary of single bytes, so no model is needed.
    """
    try:
        _compiled(_bytes(), grammar)
    except GrammarRefused as refused:
        return refused.reason
    return ""


@functools.cache
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")


def _compiled(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    matcher = LLMatcher(vocabulary, grammar, limits=LIMITS, log_level=0)
    if not matcher.is_error():
        mask = matcher.compute_bitmask()  # finds what only the first token shows, such as a rule that is itself
        if not matcher.is_error() and not any(mask):
            raise GrammarRefused("no text follows it")
    if matcher.is_error():
        raise GrammarRefused(_reason(matcher))
    return matcher


class GrammarCompiler:
    """Compiles grammars (``sources``) for one tokenizer; any thread may call it.

    Args:
        vocab_size: Token ids of the model are 0 to ``vocab_size - 1``.
        eos_token_ids: Tokens that end an output; a grammar that is complete leaves only these.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._eos_token_ids = [token_id for token_id in eos_token_ids if token_id < vocab_size]
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def follow(self, grammar: str, output_ids: Sequence[int] = (), budget: ReasoningBudget | None = None) -> Matcher:
        """Follows an output from its beginning, of which ``output_ids`` are known.

        Args:
            grammar: Empty for none.

        Raises:
            GrammarRefused: As ``problem_of``, or the model lacks a token that ends an output.
        """
        matcher: Matcher = AnyText(self.vocab_size)
        if grammar:
            matcher = TokenMatcher(self._matcher(grammar).deep_copy(), self.vocab_size)
        if budget is not None:
            matcher = BudgetMatcher(matcher, budget)
        matcher.advance(output_ids)
        return matcher

    def _matcher(self, grammar: str) -> LLMatcher:
        """The compiled grammar, which stays at its beginning."""
        with self._lock:
            found = self._compiled.get(grammar)
            if found is None:
                found = self._compiled[grammar] = self._compile(grammar)
                while len(self._compiled) > MAX_COMPILED:
                    self._compiled.popitem(last=False)
            else:
                self._compiled.move_to_end(grammar)
            return found

    def _compile(self, grammar: str) -> LLMatcher:
        if not self._eos_token_ids:
            raise GrammarRefused("the model has no token that ends an output")
        if self._vocabulary is None:
            self._vocabulary = _vocabulary(self._tokenizer, self.vocab_size, self._eos_token_ids)
        return _compiled(self._vocabulary, grammar)


class TokenMatcher:
    """Where one output stands in its grammar. One thread at a time.

    Attributes:
        num_tokens: Output tokens that it has followed.
    """

    __slots__ = ("_matcher", "_num_words", "num_tokens")

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._num_words = -(-vocab_size // 32)
        self.num_tokens = 0

    def advance(self, token_ids: Sequence[int]) -> None:
        """Follows further tokens of the output; one that the grammar forbids is a ``problem`` from then on."""
        if token_ids:
            self.num_tokens += len(token_ids)
            self._matcher.consume_tokens(list(token_ids))

    @property
    def problem(self) -> str:
        """Why no token can follow, such as a grammar that has become too costly; empty if there is no reason."""
        return _reason(self._matcher) if self._matcher.is_error() else ""

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens the grammar allows next, one after the other."""
        return 0 if self._matcher.is_error() else int(self._matcher.validate_tokens(list(token_ids)))

    def allowed(self) -> bytes:
        """A bit for each token id, the lowest of each byte first: 1 if the token may come next."""
        mask: bytes = self._matcher.compute_bitmask()
        return b"" if self._matcher.is_error() else mask

    def allowed_after(self, token_ids: Sequence[int]) -> list[bytes]:
        """``allowed`` now and after each of these tokens, up to the first that is forbidden; it stays where it is."""
        masks = [self.allowed()]
        taken = 0
        for token_id in token_ids:
            if self._matcher.try_consume_tokens([token_id]) != 1:
                break
            taken += 1
            masks.append(self.allowed())
        if taken and not self._matcher.is_error():
            self._matcher.rollback(taken)
        return masks


class _Vocabulary:
    """The tokens as ``llguidance`` asks for them."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        data = TokenBytes(tokenizer)
        self.tokens = [data.of(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = sorted(token_id for token_id in special_ids(tokenizer) if token_id < vocab_size)
        self.eos_token_id = eos_token_id
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _vocabulary(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int]) -> LLTokenizer:
    wrapped = TokenizerWrapper(_Vocabulary(tokenizer, vocab_size, eos_token_ids[0]))
    return LLTokenizer(wrapped, n_vocab=vocab_size, eos_token=eos_token_ids)


def _reason(matcher: LLMatcher) -> str:
    return plain(str(matcher.get_error()))
