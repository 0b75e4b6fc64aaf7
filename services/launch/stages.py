"""The progress of a start: in a pipe a line for each stage, with reminders about slow ones; on a terminal one line."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from farsight.core.errors import FarsightError
from farsight.core.messages.status import ProcessUse
from farsight.services.process_use import spent
from farsight.services.progress import StatusLine

SAY_EVERY_S = 10.0
"""Seconds between two reports of what a slow stage waits for."""

REWRITE_EVERY_S = 0.5
"""Seconds between two versions of a terminal's line."""

Say = Callable[[str], None]
"""Prints one line."""

Uses = Callable[[], tuple[ProcessUse, ...]]
"""Returns what every process of the start has used so far."""


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
        self.used: tuple[ProcessUse, ...] = ()
        """What the processes had used when the stage began."""


class Stages:
    """The stages of one start, which share its time limit.

    Args:
        say: Prints a line.
        patience_s: Time limit of the whole start in seconds.
        line: Shows the stage that has been open for longest, in place of a line for each; None in a pipe.
        every_s: See ``SAY_EVERY_S``.
        uses: Makes each stage say how many processor seconds all processes took while it lasted; None for no such line.
        now: The clock, in seconds.
    """

    def __init__(
        self,
        say: Say,
        patience_s: float,
        *,
        line: StatusLine | None = None,
        every_s: float = SAY_EVERY_S,
        uses: Uses | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say = say
        self._now = now
        self._line = line
        self._every_s = every_s if line is None else REWRITE_EVERY_S
        self._uses = uses
        self._open: list[StartStage] = []
        self._took: list[str] = []
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

    @property
    def summary(self) -> str:
        """What a terminal's line has shown of the ended stages, for the line after the start; empty in a pipe."""
        return "" if self._line is None else f" ({', '.join(self._took)})"

    def say(self, line: str) -> None:
        """Prints a line; may be called from any thread."""
        with self._lock, self.above():
            self._say(line)

    @contextmanager
    def above(self) -> Iterator[None]:
        """Keeps a terminal's line away from what others print in this context."""
        if self._line is None:
            yield
            return
        with self._line.above():
            yield

    def begin(self, name: str, waits_for: Callable[[], str]) -> StartStage:
        """A stage that ``end`` or ``abandon`` ends; others may run beside it."""
        stage = StartStage(name, waits_for, self._now())
        if self._uses is not None:
            stage.used = self._uses()
        with self._lock:
            self._open.append(stage)
            self._rewrite()
        threading.Thread(target=self._tell_now_and_then, args=(stage,), name=f"stage {name}", daemon=True).start()
        return stage

    def end(self, stage: StartStage) -> None:
        """Reports the outcome of a stage and its duration."""
        self.abandon(stage)
        took_s = self._now() - stage.began
        if self._line is None:
            self.say(f"{stage.name}: {stage.outcome} after {took_s:.1f} s.")
        else:
            self._took.append(f"{stage.name} {took_s:.1f} s")
        self.say_use(stage.name, stage.used)

    def say_use(self, name: str, before: tuple[ProcessUse, ...] = ()) -> None:
        """Says how many processor seconds all processes took since a reading, or in all; nothing without ``uses``."""
        if self._uses is not None:
            self.say(f"{name}: {spent(before, self._uses())}.")

    def abandon(self, stage: StartStage) -> None:
        """Stops the reports of a stage that has not ended; no effect on an ended stage."""
        with self._lock:  # The lock lets the stage's thread finish its line; no line follows.
            if not stage.over.is_set():
                stage.over.set()
                self._open.remove(stage)
                self._rewrite()

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
                if self._line is not None:
                    self._rewrite()
                elif not stage.over.is_set():
                    self._say(f"{stage.name}: not ready after {took_s:.0f} s; waits for {stage.waits_for()}.")

    def _rewrite(self) -> None:
        """Brings a terminal's line up to date; takes it away when no stage is open."""
        if self._line is not None:
            first = self._open[0] if self._open else None
            text = "" if first is None else f"{self.elapsed_s:.0f} s, {first.name}: waits for {first.waits_for()}"
            self._line.show(text)


def silent_stages(patience_s: float) -> Stages:
    """Stages that print nothing."""
    return Stages(lambda line: None, patience_s)
