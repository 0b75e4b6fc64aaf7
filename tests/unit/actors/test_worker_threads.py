"""A worker steps in a thread of its own, however many others there are in its process."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.unit.actors.components import LONG_S
from tests.unit.services.commands.test_conformance import read, system


async def test_a_worker_steps_while_all_threads_of_asyncio_are_taken(tmp_path: Path) -> None:
    async with asyncio.timeout(LONG_S), system("fcfs", tmp_path) as found, found.ingress() as client:
        release = threading.Event()
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        taken = loop.run_in_executor(None, release.wait)
        try:
            await read(client, 0)
            assert not taken.done()
        finally:
            release.set()
            await taken
