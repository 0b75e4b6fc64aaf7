"""Guesses that a request's output repeats its prompt or itself, with the same edits: prompt lookup that resumes.

Saxena, "Prompt Lookup Decoding" (2023): the tokens after an earlier occurrence of the last n tokens are the guesses.
After SuffixDecoding (Oliaro et al., 2024), their number follows from how likely the match makes each token. New here: a
copy that breaks off resumes behind an insertion, a deletion or a replacement, and the same edit is expected where the
copy meets the same token again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from farsight.policies.speculation.base import SPECULATIONS, Drafter, Speculation, SpeculationContext
from farsight.policies.speculation.price import StepPrice

NUM_CHARACTERS = 0x110000
"""Code points of Unicode."""

MAX_DRAFTS = 16
"""Most tokens guessed for a sequence in a step."""

LONGEST_MATCH = 4
"""Last tokens of which an earlier occurrence is searched first; then fewer are tried."""

RESUME_WITHIN = 8
"""Most tokens of its source that a copy that broke off may skip when it resumes ..."""

RESUME_FOR = 8
"""... and most output tokens after the break until then."""

FORWARD = 64
"""Tokens behind the latest copy in which a match is searched first; then the search goes back from the end."""

MARGIN = 0.25
"""Tokens that guesses must be expected to bring beyond the price of their rows: any step with guesses takes the host
longer."""

MAX_EDITS = 256
"""Most edits remembered of a request; then all are forgotten and learned again."""

MOST_WAIT = 15
"""Most tokens that a request waits for its next guess after guesses that were not worth it."""

_CLASS_OF_MATCH = (0, 0, 1, 2, 3, 3, 4, 4, 4, 5, 5, 5, 5, 5, 5, 5, 5)
_LONG = 6
_RESUMED = 7
_EDITED = 8
_FIRST_SHARES = (0.3, 0.45, 0.6, 0.7, 0.8, 0.85, 0.9, 0.5, 0.6)
_CONFIRMED = 3
"""The first right token after a resumption or an edit counts as a match of this length."""

_SHARED_WEIGHT = 4.0
"""Guesses that the estimate over all requests counts for in the estimate of one request."""

_RATE = 0.01
"""Weight of a guess in the estimate over all requests."""


def match_class(length: int) -> int:
    """Returns the class of a match of this length; each class has its own estimate of how often guesses are right."""
    return _CLASS_OF_MATCH[length] if length < len(_CLASS_OF_MATCH) else _LONG


class Edit(NamedTuple):
    """In place of a source's next token came ``inserted``; the copy went on ``skipped`` tokens later in the source."""

    inserted: tuple[int, ...]
    skipped: int


@dataclass(slots=True)
class CopyState:
    """A place in a request's tokens that its output is believed to copy from.

    Attributes:
        source: Index of the next token that is not inserted.
        length: Tokens of the match in front of it.
        kind: The next token's class.
        insert: Inserted tokens that come before the next token of the source.
        edited_at: Where in the source the latest edit began; below 0 where the next token is not of an edit.
    """

    source: int
    length: int
    kind: int
    insert: tuple[int, ...] = ()
    edited_at: int = -1

    def advance(self, token_ids: Sequence[int], edits: Mapping[int, Edit]) -> None:
        """Moves on after the next token came as expected."""
        if self.insert:
            self.insert = self.insert[1:]
            return
        self.source += 1
        self.length = _CONFIRMED if self.kind >= _RESUMED else self.length + 1
        self.kind = match_class(self.length)
        self.edited_at = -1
        edit = edits.get(token_ids[self.source]) if self.source < len(token_ids) else None
        if edit is not None:
            self.edited_at, self.kind = self.source, _EDITED
            self.insert, self.source = edit.inserted, self.source + edit.skipped


class NgramDrafter(Drafter):
    """Guesses for one request.

    A guess is also made where it is not worth its price; then it is not verified. The tokens that come show whether it
    was right, so that the estimates hold for all guesses.

    Args:
        shares: How often guesses of each class are right, over all requests; updated in place.
    """

    __slots__ = (
        "_broke_at",
        "_broke_length",
        "_copy",
        "_edits",
        "_guessed_at",
        "_latest",
        "_misses",
        "_next",
        "_resume",
        "_right",
        "_shares",
        "_text",
        "_tried",
    )

    def __init__(self, shares: list[float]) -> None:
        self._shares = shares
        self._text = ""  # a character a token: searched by compiled code, about a nanosecond a token
        self._copy: CopyState | None = None
        self._guessed_at = 0  # index of the token that the copy guesses
        self._resume = -1  # where a copy broke off in its source; below 0 there is none
        self._broke_at = 0  # where it broke off in the output
        self._broke_length = 0  # length of its match
        self._latest = -1  # as ``_resume``, but kept when the copy has resumed or is too long ago to resume
        self._edits: dict[int, Edit] = {}  # by the token of the source that did not come
        self._next = 0  # number of tokens from which on it guesses again
        self._misses = 0
        self._right = [0.0] * len(_FIRST_SHARES)
        self._tried = [0.0] * len(_FIRST_SHARES)

    def draft(self, token_ids: Sequence[int], price: float) -> Sequence[int]:
        """Does as ``Drafter.draft``. O(tokens) in compiled code, 4 bytes a token: little beside the KV a step reads."""
        num = len(token_ids)
        if num < self._next:
            return ()
        self._text += _characters(token_ids[len(self._text) :])
        if self._copy is not None:
            self._judge(self._copy, token_ids)
        if self._resume >= 0 and (self._copy is None or self._copy.length < self._broke_length):
            self._copy = self._resumed(token_ids) or self._copy
        if self._copy is None:
            self._copy = self._find(token_ids)
        self._guessed_at = num
        drafts = () if self._copy is None else self._worthwhile(self._copy, token_ids, price)
        if drafts:
            self._misses = 0
        else:
            self._misses += 1
            self._next = num + 1 + min(self._misses // 2, MOST_WAIT)
        return drafts

    def _judge(self, copy: CopyState, token_ids: Sequence[int]) -> None:
        """Compares the last guess with the tokens that came; the copy goes on, or breaks off."""
        for at in range(self._guessed_at, len(token_ids)):
            kind = copy.kind
            right = token_ids[at] == (copy.insert[0] if copy.insert else token_ids[copy.source])
            self._tried[kind] += 1
            self._shares[kind] += _RATE * (right - self._shares[kind])
            if right:
                self._right[kind] += 1
                copy.advance(token_ids, self._edits)
            elif not self._goes_on_unedited(copy, token_ids, at):
                self._break_off(copy, at)
                return
            if copy.source > at:
                self._copy = None  # an edit has skipped beyond the known tokens
                return

    def _goes_on_unedited(self, copy: CopyState, token_ids: Sequence[int], at: int) -> bool:
        """Returns whether a guess was wrong because its source came without the edit; forgets such an edit."""
        if copy.edited_at < 0:
            return False
        token = token_ids[copy.edited_at]
        edit = self._edits.get(token)
        came = edit is not None and len(copy.insert) == len(edit.inserted) and token_ids[at] == token
        copy.source, copy.insert, copy.edited_at = copy.edited_at, (), -1
        if came:
            del self._edits[token]
            copy.kind = match_class(copy.length)
            copy.advance(token_ids, self._edits)
        return came

    def _break_off(self, copy: CopyState, at: int) -> None:
        """Ends the copy; it may resume unless a longer copy is still expected to, or its match was below 2 tokens."""
        self._copy = None
        if copy.length >= (2 if self._resume < 0 else self._broke_length):
            self._latest = self._resume = copy.source
            self._broke_at, self._broke_length = at, copy.length

    def _find(self, token_ids: Sequence[int]) -> CopyState | None:
        """Returns a copy from where the last tokens occurred before; None if they did not."""
        text, num = self._text, len(token_ids)
        for length in range(min(LONGEST_MATCH, num - 1), 0, -1):
            tail = text[num - length :]
            found = -1
            if self._latest >= 0:  # an output that copies rarely jumps back
                found = text.find(tail, self._latest, min(self._latest + FORWARD, num - 1))
            if found < 0:
                found = text.rfind(tail, 0, num - 1)
            if found >= 0:
                return CopyState(found + length, length, match_class(length))
        return None

    def _resumed(self, token_ids: Sequence[int]) -> CopyState | None:
        """Returns the copy that broke off, behind the edit that the last tokens have ended; remembers the edit."""
        text, num, resume, broke_at = self._text, len(token_ids), self._resume, self._broke_at
        if num - broke_at > RESUME_FOR:
            self._resume = -1
            return None
        for start in range(broke_at, num):
            length = num - start
            found = text.find(text[start:], resume, min(resume + RESUME_WITHIN + length, broke_at))
            if found == resume or (found > resume and length > 1):
                self._remember(token_ids[resume], Edit(tuple(token_ids[broke_at:start]), found - resume))
                return CopyState(found + length, _CONFIRMED, _RESUMED)
        return None

    def _remember(self, token: int, edit: Edit) -> None:
        if len(self._edits) >= MAX_EDITS:
            self._edits.clear()
        self._edits[token] = edit
        self._resume = -1

    def _worthwhile(self, copy: CopyState, token_ids: Sequence[int], price: float) -> Sequence[int]:
        """Returns the guesses that are right with a probability above the price, if together they bring ``MARGIN``."""
        probability = self._share(copy.kind)
        expected = 0.0
        ahead = CopyState(copy.source, copy.length, copy.kind, copy.insert, copy.edited_at)
        drafts: list[int] = []
        while probability > price and len(drafts) < MAX_DRAFTS:
            if ahead.source >= len(token_ids):
                ahead.source = copy.source  # the guesses have reached the end: the source repeats
            drafts.append(ahead.insert[0] if ahead.insert else token_ids[ahead.source])
            ahead.advance(token_ids, self._edits)
            expected += probability - price
            probability *= self._share(ahead.kind)
        return drafts if expected >= MARGIN else ()

    def _share(self, kind: int) -> float:
        """Returns how often a guess of this class is right for this request."""
        shared = self._shares[kind] * _SHARED_WEIGHT
        return (self._right[kind] + shared) / (self._tried[kind] + _SHARED_WEIGHT)


def _characters(token_ids: Sequence[int]) -> str:
    """Returns a character for each token. Tokens beyond Unicode share characters, so that a guess may be wrong."""
    try:
        return "".join(map(chr, token_ids))
    except ValueError:
        return "".join(chr(token_id % NUM_CHARACTERS) for token_id in token_ids)


class NgramSpeculation(Speculation):
    """Prompt lookup for all requests of a worker."""

    def __init__(self) -> None:
        self._shares = list(_FIRST_SHARES)
        self._price = StepPrice()

    def open(self) -> NgramDrafter:
        return NgramDrafter(self._shares)

    def price(self, num_seqs: int) -> float:
        return self._price.ratio(num_seqs)

    def observe(self, num_seqs: int, num_drafts: int, duration_s: float) -> None:
        self._price.add(num_seqs, num_drafts, duration_s)

    def tokens(self, num_seqs: int, seconds: float) -> float:
        return self._price.tokens(num_seqs, seconds)


@SPECULATIONS.register("ngram")
def build_ngram(context: SpeculationContext) -> NgramSpeculation:
    """Guesses that the output repeats its prompt or itself."""
    return NgramSpeculation()
