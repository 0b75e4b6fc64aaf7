"""The bar that shows how far a command has come."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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


def hide_downloads() -> None:
    """Hides the bars that the hub's client shows of its downloads on a terminal; call it before its first import."""
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
