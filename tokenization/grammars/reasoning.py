"""Ends the reasoning of an output where it has become too long: the tokens that close it are the only ones allowed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from farsight.core.request import ReasoningBudget


class Matcher(Protocol):
    """What follows an output token by token, as ``TokenMatcher`` does with a grammar."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def problem(self) -> str: ...

    def advance(self, token_ids: Sequence[int]) -> None: ...

    def num_allowed(self, token_ids: Sequence[int]) -> int: ...

    def allowed(self) -> bytes: ...

    def allowed_after(self, token_ids: Sequence[int]) -> list[bytes]: ...


class AnyText:
    """Follows an output without a grammar: every token may come next."""

    problem = ""

    def __init__(self, vocab_size: int) -> None:
        self._mask = b"\xff" * (4 * -(-vocab_size // 32))
        self.num_tokens = 0

    def advance(self, token_ids: Sequence[int]) -> None:
        self.num_tokens += len(token_ids)

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        return len(token_ids)

    def allowed(self) -> bytes:
        return self._mask

    def allowed_after(self, token_ids: Sequence[int]) -> list[bytes]:
        return [self._mask] * (len(token_ids) + 1)


class ReasoningCount:
    """Where an output stands in its reasoning. A function of the budget and the output so far alone.

    Reasoning begins with the output or, where the budget names tokens that begin it, behind these, if the output begins
    with them. It ends with the tokens that end it; further ones like them count for nothing.
    """

    __slots__ = ("_budget", "_count", "_matched", "_place")

    def __init__(self, budget: ReasoningBudget) -> None:
        self._budget = budget
        self._place: Literal["before", "in", "behind"] = "before" if budget.begin else "in"
        self._matched = 0  # tokens of ``begin`` or of ``end`` that the output has ended with
        self._count = 0

    def copy(self) -> ReasoningCount:
        found = ReasoningCount(self._budget)
        found._place, found._matched, found._count = self._place, self._matched, self._count
        return found

    @property
    def forced(self) -> int | None:
        """The one token that may come next; None where any may."""
        spent = self._place == "in" and self._count >= self._budget.num_tokens
        return self._budget.end[self._matched] if spent else None

    def advance(self, token_id: int) -> None:
        if self._place == "before":
            self._begin(token_id)
        elif self._place == "in":
            self._end(token_id)

    def _begin(self, token_id: int) -> None:
        if token_id != self._budget.begin[self._matched]:
            self._place = "behind"  # an output without reasoning
            return
        self._matched += 1
        if self._matched == len(self._budget.begin):
            self._place, self._matched = "in", 0

    def _end(self, token_id: int) -> None:
        end = self._budget.end
        self._count += 1
        # The longest beginning of ``end`` that the output ends with now.
        tail = (*end[: self._matched], token_id)
        self._matched = next(n for n in range(len(tail), -1, -1) if tail[len(tail) - n :] == end[:n])
        if self._matched == len(end):
            self._place = "behind"


class BudgetMatcher:
    """Follows an output within a budget, and the grammar that it has besides.

    Args:
        inner: The grammar's matcher, or ``AnyText``.
    """

    def __init__(self, inner: Matcher, budget: ReasoningBudget) -> None:
        self._inner = inner
        self._reasoning = ReasoningCount(budget)

    @property
    def num_tokens(self) -> int:
        """Output tokens that it has followed."""
        return self._inner.num_tokens

    @property
    def problem(self) -> str:
        """As ``TokenMatcher.problem``."""
        return self._inner.problem

    def advance(self, token_ids: Sequence[int]) -> None:
        """Follows further tokens of the output."""
        self._inner.advance(token_ids)
        for token_id in token_ids:
            self._reasoning.advance(token_id)

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens may come next, one after the other."""
        return self._within(token_ids[: self._inner.num_allowed(token_ids)])

    def allowed(self) -> bytes:
        """As ``TokenMatcher.allowed``."""
        return _only(self._reasoning.forced, self._inner.allowed())

    def allowed_after(self, token_ids: Sequence[int]) -> list[bytes]:
        """As ``TokenMatcher.allowed_after``."""
        masks = self._inner.allowed_after(token_ids[: self._within(token_ids)])
        reasoning, found = self._reasoning.copy(), []
        for mask, token_id in zip(masks, (*token_ids, None), strict=False):
            found.append(_only(reasoning.forced, mask))
            if token_id is not None:
                reasoning.advance(token_id)
        return found

    def _within(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens the budget allows next."""
        reasoning = self._reasoning.copy()
        for count, token_id in enumerate(token_ids):
            if reasoning.forced not in (None, token_id):
                return count
            reasoning.advance(token_id)
        return len(token_ids)


def _only(token_id: int | None, mask: bytes) -> bytes:
    """The mask with this token alone, if it allows it; all of it for None."""
    if token_id is None or not mask:
        return mask
    place, bit = divmod(token_id, 8)
    return bytes(place) + bytes([mask[place] & (1 << bit)]) + bytes(len(mask) - place - 1)
