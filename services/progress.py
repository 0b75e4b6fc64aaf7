"""What a command shows: how far it has come, as a bar or one line that is rewritten, and tables."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def progress_bar(
    what: str, total: int | None = None, *, as_json: bool = False
) -> Iterator[Callable[[int], None] | None]:
    """Shows on stderr, if that is a terminal, how many are done; it is gone at the end.

    Args:
        what: What is counted, in the plural.
        total: How many there will be; None if that is not known, which shows no end.
        as_json: Whether the command prints JSON: then there is no bar, as the two streams may be one for who reads it.

    Yields:
        What takes the number that is done; None where there is no bar.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if as_json or not console.is_terminal:
        yield None
        return
    number = "{task.completed:,.0f}" if total is None else f"{{task.completed:,.0f}}/{total:,}"
    with Progress(
        TextColumn(what), BarColumn(), TextColumn(number), TimeElapsedColumn(), console=console, transient=True
    ) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.update(task, completed=done)


@contextmanager
def share_bar(what: str, *, as_json: bool = False) -> Iterator[Callable[[float], None] | None]:
    """The same for a share from 0 to 1, in percent; ``what`` begins with "% of"."""
    with progress_bar(what, 100, as_json=as_json) as tell:
        yield None if tell is None else lambda share: tell(int(100 * share))


class StatusLine:
    """The last line of a terminal, rewritten again and again; other lines are printed above it.

    Args:
        terminal: Where it is shown.
        columns: Returns the terminal's width.
    """

    def __init__(
        self, terminal: TextIO, columns: Callable[[], int] = lambda: shutil.get_terminal_size().columns
    ) -> None:
        self._terminal = terminal
        self._columns = columns
        self._text = ""
        self._lock = threading.RLock()

    def show(self, text: str) -> None:
        """Replaces the line; an empty text takes it away."""
        with self._lock:
            if text or self._text:
                self._text = text
                self._draw(text)

    @contextmanager
    def above(self) -> Iterator[None]:
        """Takes the line away while other lines are printed, and shows it again below them."""
        with self._lock:
            if self._text:
                self._draw("")
            try:
                yield
            finally:
                if self._text:
                    self._draw(self._text)

    def _draw(self, text: str) -> None:
        room = self._columns() - 1  # A character in the last column would begin a new line on some terminals.
        self._terminal.write(f"\r\x1b[K{text if len(text) <= room else f'{text[: room - 3]}...'}")
        self._terminal.flush()


def status_line(terminal: TextIO) -> StatusLine | None:
    """Returns a status line where there is a terminal that can rewrite one; None for a pipe or a file."""
    rewrites = terminal.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    return StatusLine(terminal) if rewrites else None


def hide_downloads() -> None:
    """Hides the bars that the hub's client shows of its downloads on a terminal; call it before its first import."""
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"


def wide_console(*, highlight: bool = True) -> Console:
    """Returns a console for tables; a pipe has no width, so it gets one that avoids cut cells."""
    from rich.console import Console

    console = Console(highlight=highlight)
    if not console.is_terminal:
        console.width = 200
    return console
