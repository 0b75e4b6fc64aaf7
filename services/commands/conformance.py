"""``python -m farsight.services.commands.conformance FILE...``: do replayed event logs of machines give the same?"""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from farsight.core.errors import FarsightError
from farsight.policies.event_log import Difference, replay


def main(paths: list[str]) -> int:
    """Prints the result for each file; returns 0 if all files replay identically."""
    if not paths:
        typer.echo(__doc__, err=True)
        return 2
    failed = False
    for path in paths:
        try:
            count, difference = replay(Path(path).read_bytes())
        except (FarsightError, OSError) as error:
            typer.echo(f"{path}: {error}", err=True)
            failed = True
            continue
        failed = failed or difference is not None
        typer.echo(f"{path}: {count} events, {'identical' if difference is None else describe(difference)}")
    return int(failed)


def describe(difference: Difference) -> str:
    """The first difference, in one line."""
    logged, replayed = (", ".join(map(repr, each)) or "nothing" for each in (difference.logged, difference.replayed))
    if difference.unlogged is not None:
        num_jobs, prompt_len, output_len = difference.unlogged
        batch = f"{num_jobs} requests, {prompt_len} prompt tokens and {output_len} output tokens"
        replayed = f"asks for the serving time of a batch of {batch}, which the log does not hold"
    return f"event {difference.index} ({type(difference.event).__name__}) gave {logged}, and now {replayed}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
