"""A private Ray cluster: started for one command, closed to everybody else, gone with it."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.runtime.names import NAMESPACE
from core.errors import FarsightError
from services.launch.haproxy import haproxy_environment
from services.launch.ports import free_ports, reserved_ports
from services.launch.signals import StopSignal
from services.run_file import ADMIN_TOKEN_VARIABLE

OBJECT_STORE_BYTES = 128 * 1024 * 1024

_REMOVE_S = 2.0
_LOOK_S = 0.05

_AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
"""What Ray calls the ports of its agents."""


class ServiceFailed(FarsightError):
    """A part that everything depends on has died."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running private cluster; ``dashboard_url`` serves Ray's Jobs API, and is empty if that was not asked for."""

    dashboard_url: str


@contextlib.contextmanager
def private_cluster(
    stop: StopSignal, *, proxy: str = "serve", port: int = 0, dashboard: bool = False
) -> Iterator[Cluster]:
    """A Ray cluster of our own with token auth, in a temporary directory and on ports that go with it.

    Args:
        stop: Its signals abandon the start.
        proxy: Of Ray Serve: ``serve`` or ``haproxy``.
        port: Where that is to listen; 0 if there is none.
        dashboard: Whether to start Ray's dashboard, with the Jobs API.

    Raises:
        FarsightError: it cannot start.
    """
    with reserved_ports(avoid=port) as ports:
        directory = Path(tempfile.mkdtemp(prefix="farsight-"))
        stop.starting(lambda: remove_directory(directory))
        _set_environment(directory, proxy, ports)
        import ray

        try:
            context = _start_ray(ports, free_ports(ports, 1)[0] if dashboard else None)
            stop.install()
            yield Cluster(f"http://{context.dashboard_url}" if dashboard else "")
        finally:
            ray.shutdown()
            remove_directory(directory)


def remove_directory(directory: Path) -> None:
    """Tries for a while: a process that is about to end may write one more file there meanwhile."""
    deadline = time.monotonic() + _REMOVE_S
    while True:
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists() or time.monotonic() > deadline:
            return
        time.sleep(_LOOK_S)


def _start_ray(ports: range, dashboard_port: int | None) -> Any:
    """Without a port, without a dashboard."""
    import ray

    try:
        with few_daemons(ports):
            return ray.init(
                address="local",
                namespace=NAMESPACE,
                include_dashboard=dashboard_port is not None,
                dashboard_port=dashboard_port,
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except Exception as error:  # Ray says no more precisely what it raises
        raise ServiceFailed(f"Ray did not start: {error}") from error


@contextlib.contextmanager
def few_daemons(ports: range) -> Iterator[None]:
    """In it, ``ray.init`` starts no daemons that a cluster on one machine has no use for: they make a start longer.

    The autoscaler's finds more machines, the log monitor's prints what workers write. Besides, Ray's agents listen on
    ports of this cluster alone. Left to itself the one that takes jobs has the same port in every cluster: of several
    on one machine, only the first would take jobs. And ports that the agents are to choose themselves are waited for,
    but only for 15 s (Ray 2.60); on a busy machine they come later, and nothing starts.

    Args:
        ports: Of this cluster alone. The last of them are taken: whoever else needs some begins with the first.
    """
    import ray._private.parameter

    parameter: Any = ray._private.parameter
    before = parameter.RayParams
    agents = dict(zip(_AGENT_PORTS, free_ports(reversed(ports), len(_AGENT_PORTS)), strict=True))

    def make(**settings: Any) -> Any:
        return before(**settings | agents | {"no_monitor": True, "include_log_monitor": False})

    parameter.RayParams = make
    try:
        yield
    finally:
        parameter.RayParams = before


def _set_environment(directory: Path, proxy: str, ports: range) -> None:
    """Must run before Ray is imported; its daemons and workers inherit it."""
    token = directory / "auth_token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ |= {
        "PYTHONPATH": os.pathsep.join(paths),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_TMPDIR": str(directory),
        "FARSIGHT_RUN_DIR": str(directory),
        ADMIN_TOKEN_VARIABLE: os.environ.get(ADMIN_TOKEN_VARIABLE) or secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        # On one machine only: the address of every node is 127.0.0.1, so no daemon of Ray listens elsewhere.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        # One event loop a replica: no thread hop a token. The ingress never blocks its loop.
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "1",
        # Ray kills a proxy that is not up after three times so long; with its 5 s no service starts on a busy machine.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        "RAY_enable_metrics_collection": "0",
        # How long Ray's own daemons wait for each other, which is 30 s unless told.
        "RAY_agent_register_timeout_ms": "120000",
        "RAY_gcs_server_port_wait_time_s": "120",
    }
    if proxy == "haproxy":
        os.environ |= haproxy_environment(directory, ports)
        del os.environ["RAY_SERVE_ENABLE_DIRECT_INGRESS"]
    else:
        os.environ["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] = "services.proxy_errors.middlewares"
