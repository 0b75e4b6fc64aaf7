"""The progress of a start: a line for each stage with its time, and reminders about slow stages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from core.errors import FarsightError

SAY_EVERY_S = 10.0
"""Seconds between two reports of what a slow stage waits for."""

Say = Callable[[str], None]
"""Prints one line."""


class StartTimedOut(FarsightError):
    """A start took longer than ``server.start_patience_s``."""


class StartStage:
    """One stage of a start; stages may run side by side.

    Args:
        waits_for: Returns in a few words what is missing; called in another thread.
    """

    def __init__(self, name: str, waits_for: Callable[[], str], now: float) -> None:
        self.name = name
        self.waits_for = waits_for
        self.began = now
        self.over = threading.Event()
        self.outcome = "started"
        """The outcome that the stage's last line reports."""


class Stages:
    """The stages of one start, which share its time limit.

    Args:
        say: Prints a line, on a terminal and in a pipe alike.
        patience_s: Time limit of the whole start in seconds.
        every_s: See ``SAY_EVERY_S``.
        now: The clock, in seconds.
    """

    def __init__(
        self,
        say: Say,
        patience_s: float,
        *,
        every_s: float = SAY_EVERY_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say = say
        self._now = now
        self._every_s = every_s
        self.patience_s = patience_s
        self._began = now()
        self._lock = threading.Lock()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start began."""
        return self._now() - self._began

    @property
    def remaining_s(self) -> float:
        """Seconds left of the time limit; negative after it."""
        return self.patience_s - self.elapsed_s

    def say(self, line: str) -> None:
        """Prints a line; may be called from any thread."""
        with self._lock:
            self._say(line)

    def begin(self, name: str, waits_for: Callable[[], str]) -> StartStage:
        """A stage that ``end`` or ``abandon`` ends; others may run beside it."""
        stage = StartStage(name, waits_for, self._now())
        threading.Thread(target=self._tell_now_and_then, args=(stage,), name=f"stage {name}", daemon=True).start()
        return stage

    def end(self, stage: StartStage) -> None:
        """Prints the outcome of a stage and its duration."""
        self.abandon(stage)
        self.say(f"{stage.name}: {stage.outcome} after {self._now() - stage.began:.1f} s.")

    def abandon(self, stage: StartStage) -> None:
        """Stops the reports of a stage that has not ended; no effect on an ended stage."""
        with self._lock:  # The lock lets the stage's thread finish its line; no line follows.
            stage.over.set()

    @contextmanager
    def stage(self, name: str, waits_for: Callable[[], str]) -> Iterator[StartStage]:
        """A stage that ends with the context, without a line if the context raises."""
        stage = self.begin(name, waits_for)
        try:
            yield stage
        finally:
            self.abandon(stage)
        self.end(stage)

    def check(self, stage: StartStage) -> None:
        """Checks the time limit; call it while a stage waits.

        Raises:
            StartTimedOut: The start took longer than its time limit.
        """
        if self.remaining_s <= 0:
            raise self.timed_out(stage)

    def timed_out(self, stage: StartStage) -> StartTimedOut:
        """The error of a stage that ran out of time."""
        return StartTimedOut(
            f"{stage.name}: not ready {self.elapsed_s:.0f} s after the start began; it waits for {stage.waits_for()}"
        )

    def _tell_now_and_then(self, stage: StartStage) -> None:
        while not stage.over.wait(self._every_s):
            took_s = self._now() - stage.began
            with self._lock:
                if not stage.over.is_set():
                    self._say(f"{stage.name}: not ready after {took_s:.0f} s; waits for {stage.waits_for()}.")


def silent_stages(patience_s: float) -> Stages:
    """Stages that print nothing."""
    return Stages(lambda line: None, patience_s)
