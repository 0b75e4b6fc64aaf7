"""Guesses that a request's output repeats its prompt or itself: prompt lookup with resumption.

Saxena, "Prompt Lookup Decoding" (2023): the tokens after an earlier occurrence of the last n ones are the guess. After
SuffixDecoding (Oliaro et al., 2024), its length follows from how likely the match makes each token. New is that the place
where a copy breaks off is kept: the copy resumes behind an insertion, a deletion or a replacement.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from policies.speculation.base import SPECULATIONS, Drafter, Speculation, SpeculationContext
from policies.speculation.price import StepPrice

MAX_DRAFTS = 16
"""Most tokens guessed for a sequence in a step."""

LONGEST_MATCH = 4
"""An earlier occurrence of so many last tokens is searched first, then of fewer."""

RESUME_WITHIN = 8
"""A copy that broke off resumes at most so many tokens away in its source ..."""

RESUME_FOR = 8
"""... and so many tokens later in the output."""

MOST_WAIT = 15
"""Most tokens that a request waits for its next guess after guesses that were not worth it."""

_SURE = 3
"""A match of so many tokens goes before the resumption of a copy."""

_CLASS_OF_MATCH = (0, 0, 1, 2, 3, 3, 4, 4, 4, 5, 5, 5, 5, 5, 5, 5, 5)
_LONG = 6
_RESUMED = 7
_NUM_CLASSES = 8
_AFTER_RESUMPTION = 3
"""The first token after a resumption confirms it: from there on it counts as a match of this length."""

_FIRST_SHARES = (0.3, 0.45, 0.6, 0.7, 0.8, 0.85, 0.9, 0.5)
_SHARED_WEIGHT = 4.0
"""Guesses that what is known from all requests counts for in the estimate of one."""
_MEMORY = 0.99


def match_class(length: int) -> int:
    """Class of a match of this length; each has its own estimate of how often its next token is right."""
    return _CLASS_OF_MATCH[length] if length < len(_CLASS_OF_MATCH) else _LONG


class RightShares:
    """How often guesses of each class are right, over all requests of a worker; earlier ones count less."""

    def __init__(self) -> None:
        self.shares = list(_FIRST_SHARES)

    def add(self, kind: int, right: bool) -> None:
        """Books a guess of this class."""
        self.shares[kind] += (1 - _MEMORY) * (right - self.shares[kind])


@dataclass(slots=True)
class Copy:
    """A place in a request's tokens that its output is believed to copy from.

    Attributes:
        source: Of the next token.
        length: Of the match in front of it.
        kind: Class of the match.
        resume: Where an earlier copy broke off in its source; below 0 there is none.
    """

    source: int
    length: int
    kind: int
    resume: int

    def advance(self, token: int, token_ids: Sequence[int]) -> None:
        """The next token was ``token``, as it should be. At the place where an earlier copy broke off that one resumes:
        its source goes on behind what was inserted.
        """
        self.source += 1
        self.length = _AFTER_RESUMPTION if self.kind == _RESUMED else self.length + 1
        self.kind = match_class(self.length)
        if self.resume >= 0 and self.source - 1 != self.resume and token == token_ids[self.resume]:
            self.source, self.kind, self.resume = self.resume + 1, _RESUMED, -1


class NgramDrafter(Drafter):
    """Guesses for one request.

    A guess is also made where it is not worth its price; only then nothing is verified. The tokens that come show
    whether it would have been right, so that the estimates hold for all guesses.

    Args:
        shared: What is known from other requests.
    """

    __slots__ = (
        "_broke_at",
        "_copy",
        "_guessed_at",
        "_misses",
        "_next",
        "_resume",
        "_right",
        "_shared",
        "_text",
        "_tried",
    )

    def __init__(self, shared: RightShares) -> None:
        self._shared = shared
        self._text = ""  # a character a token: searched by compiled code, about a nanosecond a token
        self._copy: Copy | None = None
        self._guessed_at = 0  # index of the token that the copy's source stands for
        self._resume = -1
        self._broke_at = 0
        self._next = 0  # tokens from which on it guesses again
        self._misses = 0
        self._right = [0.0] * _NUM_CLASSES
        self._tried = [0.0] * _NUM_CLASSES

    def draft(self, token_ids: Sequence[int], price: float) -> Sequence[int]:
        """See ``Drafter.draft``. O(tokens) in compiled code, 4 bytes a token; a step reads the KV of each of them."""
        num = len(token_ids)
        if num < self._next:
            return ()
        self._text += "".join(map(_character, token_ids[len(self._text) :]))
        if self._copy is not None:
            self._judge(self._copy, token_ids)
        if self._copy is None:
            self._copy = self._find(num)
        self._guessed_at = num
        drafts = () if self._copy is None else self._worthwhile(self._copy, token_ids, price)
        if drafts:
            self._misses = 0
        else:
            self._misses += 1
            self._next = num + 1 + min(self._misses // 2, MOST_WAIT)
        return drafts

    def _judge(self, copy: Copy, token_ids: Sequence[int]) -> None:
        """Compares the last guess with what came; the copy goes on, or breaks off."""
        for at in range(self._guessed_at, len(token_ids)):
            kind, source, token = copy.kind, copy.source, token_ids[at]
            right = token_ids[source] == token
            self._tried[kind] += 1
            self._shared.add(kind, right)
            if not right:
                if self._resume < 0 or at > self._guessed_at:
                    self._resume, self._broke_at = source, at
                self._copy = None
                return
            self._right[kind] += 1
            copy.advance(token, token_ids)

    def _find(self, num: int) -> Copy | None:
        """Where the last tokens occurred before, or where an earlier copy resumes."""
        text = self._text
        if num - self._broke_at > RESUME_FOR:
            self._resume = -1
        for length in range(min(LONGEST_MATCH, num - 1), 0, -1):
            if length == _SURE - 1 and self._resume >= 0:
                found = text.find(text[-1], self._resume, min(self._resume + RESUME_WITHIN, num - 1))
                if found >= 0:
                    return Copy(found + 1, length, _RESUMED, -1)
            found = text.rfind(text[num - length :], 0, num - 1)
            if found >= 0:
                return Copy(found + length, length, match_class(length), self._resume)
        return None

    def _worthwhile(self, copy: Copy, token_ids: Sequence[int], price: float) -> Sequence[int]:
        """The guesses that are right with a probability above the price."""
        probability = self._share(copy.kind)
        if probability <= price:
            return ()
        ahead = dataclasses.replace(copy)
        num = len(token_ids)
        drafts: list[int] = []
        while probability > price and len(drafts) < MAX_DRAFTS:
            token = token_ids[ahead.source] if ahead.source < num else drafts[ahead.source - num]
            drafts.append(token)
            ahead.advance(token, token_ids)
            probability *= self._share(ahead.kind)
        return drafts

    def _share(self, kind: int) -> float:
        """How often a guess of this class is right for this request."""
        shared = self._shared.shares[kind] * _SHARED_WEIGHT
        return (self._right[kind] + shared) / (self._tried[kind] + _SHARED_WEIGHT)


def _character(token_id: int) -> str:
    """A character that stands for a token; beyond Unicode's last, two tokens share one, and their guess is wrong."""
    return chr(token_id % 0x110000)


class NgramSpeculation(Speculation):
    """Prompt lookup for all requests of a worker."""

    def __init__(self) -> None:
        self._shared = RightShares()
        self._price = StepPrice()

    def open(self) -> NgramDrafter:
        return NgramDrafter(self._shared)

    def price(self, num_seqs: int) -> float:
        return self._price.ratio(num_seqs)

    def observe(self, num_seqs: int, num_drafts: int, duration_s: float) -> None:
        self._price.add(num_seqs, num_drafts, duration_s)


@SPECULATIONS.register("ngram")
def build_ngram(context: SpeculationContext) -> NgramSpeculation:
    """Guesses that the output repeats the prompt or itself."""
    return NgramSpeculation()
