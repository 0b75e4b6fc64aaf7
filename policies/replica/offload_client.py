"""Who decides about KV at a scheduling point: the KVOffloadManager while it answers in time, else the Scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from core.messages.kv import OffloadOrders, OffloadQuestion


@dataclass(slots=True)
class OffloadTally:
    """Scheduling points with KV to move, and what became of the orders; the numbers only rise.

    Attributes:
        answered: Decided by the KVOffloadManager; ``alone``: by the Scheduler.
        late: Questions without an answer by the deadline.
        refused: Orders that did not fit the state any more when they came.
    """

    answered: int = 0
    alone: int = 0
    late: int = 0
    refused: int = 0


class OffloadClient:
    """One question at a time. A manager that has missed a deadline is asked on, and not waited for until it answers
    within the deadline again.

    Args:
        deadline_s: Seconds that an answer may take; with 0 nothing is asked.
    """

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.tally = OffloadTally()
        self._asked: OffloadQuestion | None = None
        self._asked_at = 0.0
        self._is_silent = False
        self._seq = 0
        self._unsent: OffloadQuestion | None = None

    @property
    def is_asked(self) -> bool:
        """A question is open."""
        return self._asked is not None

    @property
    def waits(self) -> bool:
        """A question is open, and its answer is worth waiting for."""
        return self.is_asked and not self._is_silent

    @property
    def decides_alone(self) -> bool:
        """The Scheduler decides now, whether it asks as well or not."""
        return not self.deadline_s or self._is_silent

    @property
    def asks(self) -> bool:
        """A question may be put now."""
        return bool(self.deadline_s) and not self.is_asked

    def next_seq(self) -> int:
        self._seq += 1
        return self._seq

    def put(self, question: OffloadQuestion, now: float) -> None:
        """This is asked now."""
        self._asked = self._unsent = question
        self._asked_at = now

    def take_question(self) -> OffloadQuestion | None:
        """The question that is yet to be sent; said once."""
        question, self._unsent = self._unsent, None
        return question

    def look(self, now: float) -> None:
        """Time has passed."""
        if self.waits and now - self._asked_at >= self.deadline_s:
            self._fall_silent()

    def late(self, seq: int) -> None:
        """That question has not been answered by the deadline."""
        if self.waits and self._is_open(seq):
            self._fall_silent()

    def answer(self, orders: OffloadOrders, now: float) -> OffloadQuestion | None:
        """The question, if these are the orders that are waited for."""
        question = self._asked
        if question is None or orders.seq != question.seq:
            return None
        in_time, waited = now - self._asked_at < self.deadline_s, self.waits
        self._asked = None
        self._is_silent = not in_time
        return question if waited and in_time else None

    def unanswered(self, seq: int) -> None:
        """The answer to that question will not come: the manager is gone."""
        if self._is_open(seq):
            if self.waits:
                self._fall_silent()
            self._asked = self._unsent = None

    def forget(self) -> None:
        """The worker is another one: an open question is about nothing that is."""
        self._asked = self._unsent = None

    def _is_open(self, seq: int) -> bool:
        return self._asked is not None and self._asked.seq == seq

    def _fall_silent(self) -> None:
        self._is_silent = True
        self.tally.late += 1
