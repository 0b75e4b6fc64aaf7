"""One live service of the demo: a ``farsight serve`` in a process of its own, its processes, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from farsight.core.errors import FarsightError
from farsight.services.api.access.access_control import API_KEY_VARIABLE
from farsight.services.demo.settings import to_toml
from farsight.services.run_file import ADMIN_TOKEN_VARIABLE

START_S = 300.0
"""A service that has not answered by then has failed."""

STOP_S = 30.0
LOOK_S = 0.1
SHOWN_CHARS = 2000

_PROGRAM = (
    "from farsight.core.children import end_with_parent; end_with_parent({parent});"
    " from farsight.services.cli import app; app(prog_name='farsight')"
)
"""A service ends with the demo, however that ends."""


class LiveService:
    """Runs one service on a free port of this machine.

    Args:
        folder: Where its configuration and its log go.
        tables: Its configuration.
    """

    def __init__(self, preset: str, folder: Path, tables: dict[str, dict[str, Any]]) -> None:
        self.preset = preset
        self._config = folder / f"{preset}.toml"
        self._log = folder / f"{preset}.log"
        self._config.write_text(to_toml(tables), encoding="utf-8")
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._seen: list[psutil.Process] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Begins to start it."""
        program = _PROGRAM.format(parent=os.getpid())
        words = [sys.executable, "-c", program, "serve", "--config", str(self._config), "--port", str(self.port)]
        own = {API_KEY_VARIABLE, ADMIN_TOKEN_VARIABLE}  # The demo sends no key: the services listen on loopback alone.
        environment = {name: value for name, value in os.environ.items() if name not in own}
        with self._log.open("wb") as log:
            # A session of its own: the terminal's Ctrl-C reaches the demo, which ends its services itself.
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    async def wait_ready(self, session: aiohttp.ClientSession) -> None:
        """Until it answers.

        Raises:
            FarsightError: It ended, or it takes too long; with the end of its log.
        """
        try:
            async with asyncio.timeout(START_S):
                while not await self._answers(session):
                    if self._process is None or self._process.poll() is not None:
                        raise FarsightError(f"the service with preset {self.preset} ended: {self._log_end()}")
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            raise FarsightError(
                f"the service with preset {self.preset} did not answer within {START_S:g} s: {self._log_end()}"
            ) from None

    async def _answers(self, session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get(f"{self.url}/health") as reply:
                return reply.status == 200
        except (aiohttp.ClientError, OSError):
            return False

    def last_line(self) -> str:
        """The last line that it printed: its stage while it starts."""
        return (self._log_end().splitlines() or [""])[-1]

    def _log_end(self) -> str:
        with contextlib.suppress(OSError):
            return self._log.read_text(encoding="utf-8", errors="replace")[-SHOWN_CHARS:].strip()
        return ""

    async def kill_worker(self, session: aiohttp.ClientSession) -> int:
        """Sends SIGKILL to the process of its model worker.

        Returns:
            The pid.

        Raises:
            FarsightError: No worker is ready, or its process is not one of this service's.
        """
        try:
            async with session.get(f"{self.url}/status") as reply:
                rows = (await reply.json())["actors"]
        except (aiohttp.ClientError, OSError, ValueError, LookupError) as error:
            raise FarsightError(f"the service with preset {self.preset} does not say where its worker runs") from error
        pids = [row["pid"] for row in rows if row["kind"] == "ModelWorker" and row["state"] == "ready"]
        if not pids:
            raise FarsightError(f"no worker of the service with preset {self.preset} is ready; wait a few seconds")
        await asyncio.to_thread(self._kill, pids[0])
        return int(pids[0])

    def _kill(self, pid: int) -> None:
        own = next((each for each in self._descendants() if each.pid == pid), None)
        if own is None:
            raise FarsightError(f"process {pid} does not belong to the service with preset {self.preset}")
        with contextlib.suppress(psutil.NoSuchProcess):
            own.send_signal(signal.SIGKILL)  # psutil refuses if another process has got the pid

    def _descendants(self) -> list[psutil.Process]:
        if self._process is None:
            return []
        try:
            return list(psutil.Process(self._process.pid).children(recursive=True))
        except psutil.NoSuchProcess:
            return []

    def interrupt(self) -> None:
        """Begins to end it, as Ctrl-C does."""
        if self._process is not None and self._process.poll() is None:
            self._seen = self._descendants()
            self._process.send_signal(signal.SIGINT)

    def wait_ended(self) -> None:
        """Until it and every process that it started are gone; what does not end in time is killed."""
        if self._process is None:
            return
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _, alive = psutil.wait_procs(self._seen, timeout=STOP_S)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def free_port() -> int:
    """A port of the loopback address on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
