"""Whether a process hangs, judged by what it answers and what its threads do. No clock, no I/O: readings are handed in.

That something is late proves nothing on a busy machine. A thread that has neither computed nor waited for a processor
in all that time proves much: it is stopped, or waits for what does not come.
"""

from __future__ import annotations

from core.messages.pulse import Pulse, ThreadClock, Work

PATIENCE = 10.0
"""So many times the bound has a thread that computes, waits for a processor, or of which nothing is known."""

START_S = 600.0
"""A process that has never been heard of may take so long to come up."""

MAX_LATE = 2.0
"""A look counts as this many periods at most: by how much the watcher itself was late is not held against anyone."""


class Stillness:
    """How long something has been due, and for how much of that its thread has stood still."""

    def __init__(self) -> None:
        self.due_s = 0.0
        self.still_s = 0.0
        self._clock: ThreadClock | None = None

    def look(self, passed_s: float, clock: ThreadClock | None, bound_s: float) -> bool:
        """Whether it will not come any more.

        Args:
            passed_s: Since the look before.
            clock: Of the thread it is to come from, as read now; None where it cannot be read.
            bound_s: In which a thread that stands still would have brought it.
        """
        self.due_s += passed_s
        before, self._clock = self._clock, clock
        if clock is None or clock.runnable or (before is not None and clock.effort_s != before.effort_s):
            self.still_s = 0.0
        elif before is not None:
            self.still_s += passed_s
        return self.still_s >= bound_s or self.due_s >= PATIENCE * bound_s


class HostJudge:
    """Judges one process, from its first look on.

    Args:
        silence_s: What a process that stands still may owe an answer.
        period_s: Between two looks, if the watcher is in time.
    """

    def __init__(self, silence_s: float, period_s: float) -> None:
        self._silence_s = silence_s
        self._period_s = period_s
        self._looked_at: float | None = None
        self._heard = False
        self._silence = Stillness()
        self._work: dict[str, tuple[int, Stillness]] = {}

    def look(self, now: float, pulse: Pulse | None, clock: ThreadClock | None) -> str:
        """Why the process is to be replaced; empty if it is not.

        Args:
            pulse: What it has answered since the last look; None if nothing.
            clock: Of the thread that answers, as read now; None where it cannot be read.
        """
        passed_s = 0.0 if self._looked_at is None else min(now - self._looked_at, MAX_LATE * self._period_s)
        self._looked_at = now
        if pulse is not None:
            self._heard = True
            self._silence = Stillness()
            return self._stuck(pulse.work, passed_s)
        known = self._heard or clock is not None
        bound_s = self._silence_s if known else max(self._silence_s, START_S / PATIENCE)
        if not self._silence.look(passed_s, clock, bound_s):
            return ""
        how = ", stopped or blocked" if self._silence.still_s >= bound_s else ""
        return f"no answer for {self._silence.due_s:.1f} s{how}"

    def _stuck(self, work: tuple[Work, ...], passed_s: float) -> str:
        """Why, if one of the components does not get on with what it is at."""
        before, self._work = self._work, {}
        for each in work:
            count, stillness = before.get(each.name, (None, Stillness()))
            is_same = count == each.count
            if not is_same:
                stillness = Stillness()
            self._work[each.name] = each.count, stillness
            if stillness.look(passed_s if is_same else 0.0, each.clock, each.bound_s):
                how = "blocked" if stillness.still_s >= each.bound_s else "computing or waiting for a processor"
                return f"{each.name}: work {each.count} has not ended for {stillness.due_s:.1f} s, {how}"
        return ""
