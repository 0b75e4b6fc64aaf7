"""A Redis server of a test's own, which it may kill."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.free_ports import free_port

LONG_S = 120.0

DURABLE = {"appendonly": "yes", "appendfsync": "always"}


class RedisServer:
    """Listens on a free port of the loopback interface; its files lie in ``directory``."""

    def __init__(self, command: str, directory: Path, settings: dict[str, str]) -> None:
        self._command = command
        self._directory = directory
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Returns when it answers; its append-only file has been read by then."""
        settings = {"port": str(self.port), "bind": "127.0.0.1", "dir": str(self._directory), "save": ""}
        flags = [
            part
            for name, value in (settings | self._settings).items()
            for part in (f"--{name}", *(value.split() or [""]))
        ]
        self._process = subprocess.Popen([self._command, *flags], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + LONG_S
        while self._ask("PING") != "+PONG":
            assert self._process.poll() is None, f"redis-server has ended with {self._process.returncode}"
            assert time.monotonic() < deadline, "redis-server does not answer"
            time.sleep(0.01)

    def kill(self) -> None:
        """``kill -9``."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def empty(self) -> None:
        assert self._ask("FLUSHALL") == "+OK"

    def _ask(self, command: str) -> str | None:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=LONG_S) as connection:
                connection.sendall(f"{command}\r\n".encode())
                return connection.recv(1000).decode().strip()
        except OSError:
            return None


@contextmanager
def redis_server(directory: Path, **settings: str) -> Iterator[RedisServer]:
    """A running server that syncs every write, unless ``settings`` (``_`` for ``-``) say otherwise."""
    command = shutil.which("redis-server")
    if command is None:
        message = "redis-server is not installed (apt-get install redis-server)"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    server = RedisServer(
        command, directory, DURABLE | {name.replace("_", "-"): each for name, each in settings.items()}
    )
    server.start()
    try:
        yield server
    finally:
        server.kill()
