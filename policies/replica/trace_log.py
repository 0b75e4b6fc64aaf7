"""What a scheduler remembers of its decisions about each request, so that they can be explained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from core.decisions import DecisionPacker, Facts
from core.errors import IntegrityError
from core.request import Request

MAX_DECISIONS = 64
"""Of one request: the first half of them and the latest; those between are counted only."""

MAX_IN_ALL = 100_000
"""Beyond so many no more are noted, only counted."""


@dataclass(slots=True)
class Account:
    """All that was decided about one attempt on one replica.

    Attributes:
        placement: What the Router says of why it came here; ``core.decisions``, packed.
        decisions: On the scheduler's clock, each packed at once: many small objects that live long are dear to collect.
        num_left_out: Those that there was no room for.
    """

    request: Request
    placement: bytes
    decisions: list[bytes] = field(default_factory=list)
    num_left_out: int = 0


class Journal:
    """Accounts of the requests that are here; only of those whose ``origin`` is known, since nobody can ask for others.

    ``note`` is O(1) up to a constant, ``MAX_DECISIONS``.
    """

    def __init__(self, max_decisions: int = MAX_DECISIONS, max_in_all: int = MAX_IN_ALL) -> None:
        self._max_decisions = max_decisions
        self._max_in_all = max_in_all
        self._open: dict[str, Account] = {}
        self._closed: list[Account] = []
        self._num_noted = 0
        self._packer = DecisionPacker()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def open(self, request: Request, placement: bytes = b"") -> bool:
        """Whether an account of the request begins here and now."""
        if request.origin is None or request.request_id in self._open:
            return False
        self._open[request.request_id] = Account(request, placement)
        return True

    def note(self, request_id: str, kind: str, now: float, facts: Facts) -> None:
        """A decision about a request; of one without an account there is nothing to note."""
        account = self._open.get(request_id)
        if account is None:
            return
        if self._num_noted >= self._max_in_all:
            account.num_left_out += 1
            return
        if len(account.decisions) >= self._max_decisions:
            del account.decisions[self._max_decisions // 2]
            account.num_left_out += 1
        else:
            self._num_noted += 1
        account.decisions.append(self._packer.pack(kind, now, facts))

    def close(self, request_id: str) -> None:
        """The request is here no more."""
        account = self._open.pop(request_id, None)
        if account is not None:
            self._num_noted -= len(account.decisions)
            self._closed.append(account)

    @property
    def has_closed(self) -> bool:
        return bool(self._closed)

    def take_closed(self) -> list[Account]:
        """Accounts closed since this was last asked."""
        closed, self._closed = self._closed, []
        return closed

    def of(self, response_id: str) -> Iterator[Account]:
        """The open accounts of one answer. O(requests)."""
        for account in self._open.values():
            if account.request.origin is not None and account.request.origin.response_id == response_id:
                yield account

    def check_integrity(self, known: set[str]) -> None:
        """Raises IntegrityError unless every account is of a request that is known, and the bounds hold."""
        if not self._open.keys() <= known:
            raise IntegrityError(f"accounts of requests that are not here: {self._open.keys() - known}")
        num_noted = sum(len(account.decisions) for account in self._open.values())
        if num_noted != self._num_noted or num_noted > self._max_in_all:
            raise IntegrityError(f"{num_noted} decisions are noted, {self._num_noted} are counted")
