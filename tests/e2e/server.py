"""A real ``farsight serve`` as a child process, and what a user can see of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from farsight.services.run_file import run_directory
from tests.free_ports import free_port

LONG_S = 300.0
"""For anything that is not what a test is about: a busy machine must not fail it."""

POLL_S = 0.2
"""Each question for the status costs every component some time, which what is waited for lacks."""

START_TIMEOUT_S = LONG_S
GONE_TIMEOUT_S = LONG_S
"""For the end of a server; that Ctrl-C takes 10 s at most is promised, and no test's verdict."""


def farsight(*args: str) -> list[str]:
    return [sys.executable, "-m", "farsight.services.cli", *args]


@dataclass
class Server:
    """One running server and everything it started."""

    process: subprocess.Popen[str]
    port: int
    log: Path

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str, timeout_s: float = LONG_S) -> Any:
        with urllib.request.urlopen(self.base_url + path, timeout=timeout_s) as reply:
            return json.load(reply)

    def answers(self) -> bool:
        """Whether a server behind the proxy does; for polling."""
        try:
            self.get("/health", timeout_s=10)
        except OSError:
            return False
        return True

    def children(self) -> list[psutil.Process]:
        """Every process that the server started, directly or not."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def pid_of(self, component: str) -> int:
        """The process of the first component of that kind or name, once it is ready: a late one is shown as dead,
        and it may be unknown where it lives."""
        found: list[int] = []

        def is_ready() -> bool:
            rows = self.get("/status")["actors"]
            found[:] = [
                row["pid"] for row in rows if component in (row["kind"], row["name"]) and row["state"] == "ready"
            ]
            return bool(found)

        wait_until(is_ready, f"no {component} is ready")
        return found[0]

    def wait_idle(self, timeout_s: float = LONG_S, *, ingress_too: bool = True) -> None:
        """Until no request is left anywhere and the KV pool is whole; fails loudly otherwise.

        Args:
            ingress_too: Whether to wait for the ingress replicas; a dead one still shows what it last said.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.get("/status")
            rows = [row for row in status["actors"] if ingress_too or row["kind"] != "Ingress"]
            busy = any(row["queue"] for row in rows)
            silent = any(row["state"] == "dead" for row in rows)  # what it has is not known
            kv = status["kv"]
            if not busy and not silent and kv["free_blocks"] == kv["num_blocks"]:
                return
            assert time.monotonic() < deadline, f"not idle after {timeout_s} s: {status}"
            time.sleep(POLL_S)

    def stop(self, number: int = signal.SIGINT) -> None:
        """Sends Ctrl-C as a terminal does, to the whole process group, or TERM to the server alone; waits for it."""
        assert self.process.poll() is None, f"the server has ended by itself: {self.log.read_text()}"
        children = self.children()
        if number == signal.SIGINT:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)
        self.wait_gone(children)

    def wait_gone(self, children: list[psutil.Process]) -> None:
        """Until the server has exited and nothing that it started is left."""
        deadline = time.monotonic() + GONE_TIMEOUT_S
        self.process.wait(GONE_TIMEOUT_S)
        _, alive = psutil.wait_procs(children, timeout=max(0.0, deadline - time.monotonic()))
        assert not alive, f"left after {GONE_TIMEOUT_S} s: {alive}"


def wait_until(holds: Callable[[], object], otherwise: str) -> None:
    """Polls; fails with these words when it has not come true for ``LONG_S``."""
    deadline = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < deadline, otherwise
        time.sleep(POLL_S)


def kill_all(processes: Iterable[psutil.Process]) -> None:
    """Those that are still there: one that ends with another may be gone before its turn comes."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def name_of(process: psutil.Process) -> str:
    """Empty if it has just ended, as idle workers of Ray do at any time."""
    try:
        return str(process.name())
    except psutil.NoSuchProcess:
        return ""


def holds_torch(process: psutil.Process) -> bool:
    """Whether it is, or is about to be, a model worker: no other component loads the library."""
    try:
        return any("libtorch" in mapped.path for mapped in process.memory_maps(grouped=True))
    except psutil.Error:
        return False  # it has just ended


def spawn_server(log: Path, *flags: str, command: str = "serve") -> Server:
    """Begins ``farsight serve``, or another command that serves, and does not wait."""
    port = free_port()
    with log.open("w") as out:
        process = subprocess.Popen(
            farsight(command, "--port", str(port), *flags),
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    return Server(process, port, log)


def one_ingress(folder: Path) -> tuple[str, str]:
    """Flags for one ingress replica, however many cores the machine has."""
    config = folder / "one_ingress.toml"
    config.write_text("[server]\ningress_replicas = 1\n")
    return "--config", str(config)


def start_server(log: Path, *flags: str, command: str = "serve") -> Server:
    """Starts ``farsight serve``, or another command that serves, and waits until it answers and has left its run file,
    with which its start is over."""
    server = spawn_server(log, *flags, command=command)
    process = server.process
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server ended: {log.read_text()}"
        if _is_published(server) and server.answers():
            return server
        time.sleep(POLL_S)
    server.stop()
    raise AssertionError(f"no answer after {START_TIMEOUT_S} s: {log.read_text()}")


def _is_published(server: Server) -> bool:
    """Requests are answered a moment earlier; but till then a signal abandons the start, and the token stays unread."""
    try:
        return bool(json.loads((run_directory() / f"{server.port}.json").read_text())["pid"] == server.process.pid)
    except (OSError, ValueError):
        return False  # not there yet, or not written to its end
