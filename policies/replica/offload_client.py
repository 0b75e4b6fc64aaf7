"""Tracks who decides about KV at a scheduling point: the KVOffloadManager if it answers in time, else the Scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from core.messages.kv import OffloadOrders, OffloadQuestion


@dataclass(slots=True)
class OffloadTally:
    """Counts of scheduling points with KV to move, and of orders that came to nothing; the numbers only rise.

    Attributes:
        answered: Points decided by the KVOffloadManager; ``alone``: by the Scheduler.
        late: Questions without an answer by the deadline.
        refused: Orders that no longer fitted the state when they came.
    """

    answered: int = 0
    alone: int = 0
    late: int = 0
    refused: int = 0


class OffloadClient:
    """Asks the KVOffloadManager one question at a time. A manager that has missed a deadline is still asked, but not
    waited for until it answers within the deadline again.

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
        """Opens a question, which is still to be sent."""
        self._asked = self._unsent = question
        self._asked_at = now

    def take_question(self) -> OffloadQuestion | None:
        """Returns the question that is still to be sent, once; None if there is none."""
        question, self._unsent = self._unsent, None
        return question

    def look(self, now: float) -> None:
        """Stops waiting for the open question if its deadline has passed."""
        if self.waits and now - self._asked_at >= self.deadline_s:
            self._fall_silent()

    def late(self, seq: int) -> None:
        """Stops waiting for this question, which was not answered by the deadline."""
        if self.waits and self._is_open(seq):
            self._fall_silent()

    def answer(self, orders: OffloadOrders, now: float) -> OffloadQuestion | None:
        """Closes the question that these orders answer; returns it if they are waited for and in time, else None."""
        question = self._asked
        if question is None or orders.seq != question.seq:
            return None
        in_time, waited = now - self._asked_at < self.deadline_s, self.waits
        self._asked = None
        self._is_silent = not in_time
        return question if waited and in_time else None

    def unanswered(self, seq: int) -> None:
        """Closes this question and stops waiting: its answer will not come, since the manager is gone."""
        if self._is_open(seq):
            if self.waits:
                self._fall_silent()
            self._asked = self._unsent = None

    def forget(self) -> None:
        """Drops an open question, which was about an earlier worker."""
        self._asked = self._unsent = None

    def _is_open(self, seq: int) -> bool:
        return self._asked is not None and self._asked.seq == seq

    def _fall_silent(self) -> None:
        self._is_silent = True
        self.tally.late += 1
