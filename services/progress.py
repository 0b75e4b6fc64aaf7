"""The bar that shows how far a command has come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(what: str, total: int | None = None) -> Iterator[Callable[[int], None] | None]:
    """Shows on stderr, if that is a terminal, how many are done; it is gone at the end.

    Args:
        what: What is counted, in the plural.
        total: How many there will be; None if that is not known, which shows no end.

    Yields:
        What takes the number that is done; None where stderr is no terminal.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    number = "{task.completed:,.0f}" if total is None else f"{{task.completed:,.0f}}/{total:,}"
    with Progress(
        TextColumn(what), BarColumn(), TextColumn(number), TimeElapsedColumn(), console=console, transient=True
    ) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.update(task, completed=done)
