"""A server as a child process: starts it, waits until it answers, ends it and looks for remaining processes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common.tagged import wait_until_gone
from farsight.engine.checkpoint.gguf_model import gguf_config
from farsight.services.bench.load import ProcessTree
from farsight.services.launch.launch import EMBEDDED_NAME
from farsight.tokenization.gguf_file import is_gguf, read_gguf

TAG = "FARSIGHT_BENCH_RUN"
"""Environment variable that marks every process of the server, whichever process adopts it."""

POLL_S = 0.1
STOP_TIMEOUT_S = 10.0
KILL_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """How a server is started.

    Attributes:
        port: Port on the loopback interface; ``words`` pass it to the server.
        model_name: Name of its model in requests.
        env: Added to our own environment.
    """

    words: Sequence[str]
    port: int
    model_name: str
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class RunningServer:
    """A server that has been started, in the main thread: it ends with that (``_ending_with_us``).

    Args:
        log: Where its output goes.
    """

    def __init__(self, command: ServerCommand, log: Path) -> None:
        self.command = command
        self.log = log
        self._tag = uuid.uuid4().hex
        self.started_at = time.perf_counter()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*_ending_with_us(), *command.words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | command.env | {TAG: self._tag},
                start_new_session=True,  # a Ctrl-C at the terminal is for us; we pass it on
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def tree(self) -> ProcessTree:
        return ProcessTree(self.pid)

    def wait_until_ready(self, timeout_s: float) -> float:
        """Waits for /health; returns the seconds since the start.

        Raises:
            RuntimeError: it ended, or is not ready in time.
        """
        while time.perf_counter() - self.started_at < timeout_s:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended with status {self._process.returncode}:\n{self._last_output()}")
            try:
                with urllib.request.urlopen(f"{self.command.base_url}/health", timeout=5):
                    return time.perf_counter() - self.started_at
            except OSError:
                time.sleep(POLL_S)
        raise RuntimeError(f"the server was not ready after {timeout_s:.0f} s:\n{self._last_output()}")

    def first_token(self) -> float:
        """Has one token made; returns the seconds since the start."""
        body = {"model": self.command.model_name, "prompt": "a", "max_tokens": 1, "temperature": 0}
        request = urllib.request.Request(
            f"{self.command.base_url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60):
            return time.perf_counter() - self.started_at

    def stop(self) -> dict[str, Any]:
        """Sends Ctrl-C; returns how the server ended. Processes left after the time limit are named and killed."""
        began = time.perf_counter()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_TIMEOUT_S)
        left = wait_until_gone(TAG, self._tag, STOP_TIMEOUT_S - (time.perf_counter() - began))
        took_s = time.perf_counter() - began
        described = [_describe(process) for process in left]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        psutil.wait_procs(left, timeout=KILL_TIMEOUT_S)
        return {"stop_s": took_s, "exit_status": self._process.returncode, "left_behind": described}

    def _last_output(self) -> str:
        return self.log.read_text("utf-8", errors="replace")[-2000:]


def _ending_with_us() -> list[str]:
    """Leading words of a command whose process gets TERM when the thread that started it is gone.

    A benchmark that is killed ends no server: without this, that would go on. Where util-linux is missing it does.
    """
    found = shutil.which("setpriv")
    # This process may have ended before the child registers for the signal.
    begin = ["sh", "-c", '[ "$PPID" = "$0" ] && exec "$@"', str(os.getpid())]
    return [found, "--pdeathsig", "TERM", *begin] if found else []


def farsight_command(model_dir: Path | None, options: Sequence[str]) -> ServerCommand:
    """``farsight serve`` of this checkout, in benchmark mode: its bounds on what waits are off.

    Args:
        model_dir: None for the embedded model.
        options: More arguments.
    """
    port = free_port()
    words = [sys.executable, "-m", "farsight.services.cli", "serve", "--benchmark-mode", "--port", str(port)]
    if model_dir is None:
        return ServerCommand([*words, *options], port, EMBEDDED_NAME)
    return ServerCommand(
        [*words, "--model", str(model_dir), *options], port, model_dir.resolve().name.removesuffix(".gguf")
    )


def emulated_device(folder: Path, profile: Mapping[str, float]) -> list[str]:
    """Options of ``farsight serve`` for a device with these prices, which go into ``folder``, and little memory."""
    path = folder / "profile.json"
    path.write_text(json.dumps(profile))
    return ["--device", f"emulated:{path}", "--kv-memory", "64MiB"]


def free_port() -> int:
    """A port of the loopback interface on which no process listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def vocab_size(model_dir: Path) -> int:
    """As the model's ``config.json`` says it, or the header of its GGUF file."""
    if is_gguf(model_dir):
        raw = gguf_config(read_gguf(model_dir))
    else:
        raw = json.loads((model_dir / "config.json").read_text("utf-8"))
    size: int = raw["vocab_size"]
    return size


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:120]}"
    except psutil.Error:
        return str(process.pid)
