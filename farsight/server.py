"""A server beside this process, as ``farsight serve`` starts it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self, Unpack

from farsight.core.config.load import load_config
from farsight.core.errors import FarsightError
from farsight.keywords import ServerSettings
from farsight.policies.compose import check_scheduler
from farsight.services.commands.ask import KEY_VARIABLE, ask
from farsight.services.settings import naming, overrides_of

LOOK_S = 0.2
ANSWER_S = 5.0
START_S = 600.0
"""Most seconds that a start may take; a server gives up after the same time."""

END_S = 120.0
"""Seconds after which a server that does not end is killed: open requests have 30 of them."""

TOLD_LINES = 20


class Server:
    """A server of its own processes: ``with Server("smollm2") as server`` starts it and ends it.

    Args:
        model: As for ``LLM``.
        port: A free one if not given.
        config: A ``farsight.toml``; keywords override it.
        settings: As the flags of ``farsight serve``.

    Attributes:
        url: Its address, as ``http://127.0.0.1:8000``; the OpenAI API is below ``/v1``.
        api_key: What clients have to send; empty where no key is asked for.

    Raises:
        FarsightError: A setting is wrong, or the server does not start; the message is its own.
    """

    def __init__(
        self,
        model: str | Path = "",
        *,
        port: int | None = None,
        config: str | Path | None = None,
        **settings: Unpack[ServerSettings],
    ) -> None:
        given: dict[str, Any] = dict(settings)
        self.api_key = str(given.pop("api_key", "") or "")
        overrides = overrides_of(given | ({"model": str(model)} if str(model) else {}))
        with naming(overrides, flags=False):  # at once, by the keyword's name, and not as the log of a failed start
            check_scheduler(load_config(None if config is None else Path(config), overrides).scheduler)
        host = str(given.get("host", "127.0.0.1"))
        self.port = port or _free_port(host)
        scheme = "https" if given.get("tls_cert") else "http"
        self.url = f"{scheme}://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{self.port}"
        self._words = [sys.executable, "-m", "farsight", "serve", "--port", str(self.port)]
        self._words += [] if config is None else ["--config", str(config)]
        self._words += ["--model", str(model)] if str(model) else []
        self._words += [word for name, value in given.items() for word in _flag(name, value)]
        self._process: subprocess.Popen[bytes] | None = None
        self._log = Path(tempfile.gettempdir())

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts the server; returns when it takes requests. Does nothing if it runs."""
        if self._process is not None:
            return
        handle, name = tempfile.mkstemp(prefix="farsight-server-", suffix=".log")
        self._log = Path(name)
        environment = os.environ | ({KEY_VARIABLE: self.api_key} if self.api_key else {})
        with open(handle, "wb") as log:
            self._process = subprocess.Popen(
                self._words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
            )
        try:
            self._wait(self._process)
        except BaseException:
            self.stop()
            raise

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        last = time.monotonic() + START_S
        while True:
            if process.poll() is not None:
                raise FarsightError(f"the server has not started: {self.log()}")
            try:
                ask(self.url, "/health/ready", ANSWER_S)
                return
            except FarsightError as error:
                if time.monotonic() > last:
                    raise FarsightError(f"the server takes no requests after {START_S:.0f} s: {self.log()}") from error
            time.sleep(LOOK_S)

    def log(self, lines: int = TOLD_LINES) -> str:
        """Returns the last lines that the server has printed."""
        if not self._log.is_file():
            return ""
        return "\n".join(self._log.read_text("utf-8", "replace").splitlines()[-lines:])

    def stop(self) -> None:
        """Ends the server: open requests have ``drain_s`` to end. Does nothing if it does not run."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._log.unlink(missing_ok=True)


def _flag(name: str, value: Any) -> list[str]:
    """Returns the words of the command line that say the same as a keyword."""
    flag = f"--{name.replace('_', '-')}"
    if value is None or value is False:
        return ["--no-prefix-cache"] if value is False and name in ("prefix_cache", "enable_prefix_caching") else []
    if value is True:
        return [flag]
    values = list(value) if isinstance(value, list | tuple) else [value]
    return [word for each in values for word in (flag, str(each))]


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
