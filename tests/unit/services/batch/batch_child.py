"""Runs a batch over the scripted backend, in a process of its own that a test can kill: IN OUT CALLS MAX_CALLS.

Each call of the backend leaves one line with its number in CALLS. After so many calls it answers no more, so that the
batch cannot come to its end before a test that is late kills it.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from farsight.services.api.batches.lines import LineResult, read_batch
from farsight.services.api.batches.sender import run_lines
from farsight.services.batch.progress import ProgressStore
from tests.unit.services.api.api_support import ScriptedBackend, Step
from tests.unit.services.batch.batch_support import echo, number_of, served

CONCURRENCY = 8
FOR_EVER_S = 3600.0


def main(source: Path, target: Path, calls: Path, max_calls: int) -> None:
    batch = read_batch(source)
    left = iter(range(max_calls))
    with (
        tempfile.TemporaryDirectory() as folder,
        calls.open("ab", buffering=0) as log,
        ProgressStore.open(target, batch) as store,
    ):

        def script(prompt_ids: tuple[int, ...]) -> Sequence[Step]:
            number = number_of(prompt_ids)
            os.write(log.fileno(), b"%d\n" % number)
            answers = next(left, None) is not None
            return echo(prompt_ids, wait_s=0.004 + number % 7 * 0.004 if answers else FOR_EVER_S)

        async def keep(results: Sequence[LineResult]) -> None:
            await asyncio.to_thread(store.append, results)

        app = served(Path(folder), ScriptedBackend(script))
        asyncio.run(run_lines(app, store.left(), keep, asyncio.Semaphore(CONCURRENCY)))
        store.finish()


if __name__ == "__main__":
    source, target, calls, max_calls = sys.argv[1:]
    main(Path(source), Path(target), Path(calls), int(max_calls))
