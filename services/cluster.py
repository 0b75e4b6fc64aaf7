"""A private Ray cluster: started for one command, closed to everybody else, gone with it."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.names import NAMESPACE
from core.errors import FarsightError
from services.haproxy import haproxy_environment
from services.run_file import ADMIN_TOKEN_VARIABLE
from services.signals import StopSignal

OBJECT_STORE_BYTES = 128 * 1024 * 1024


class ServiceFailed(FarsightError):
    """A part that everything depends on has died."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running private cluster; ``dashboard_url`` serves Ray's Jobs API, and is empty if that was not asked for."""

    dashboard_url: str


@contextlib.contextmanager
def private_cluster(stop: StopSignal, *, proxy: str = "serve", dashboard: bool = False) -> Iterator[Cluster]:
    """A Ray cluster of our own with token auth, in a temporary directory that goes with it."""
    directory = Path(tempfile.mkdtemp(prefix="farsight-"))
    stop.starting(lambda: shutil.rmtree(directory, ignore_errors=True))
    _set_environment(directory, proxy)
    import ray

    try:
        context = _start_ray(dashboard)
        stop.install()
        yield Cluster(f"http://{context.dashboard_url}" if dashboard else "")
    finally:
        ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


def _start_ray(dashboard: bool) -> Any:
    import ray

    try:
        with any_agent_port():
            return ray.init(
                address="local",
                namespace=NAMESPACE,
                include_dashboard=dashboard,
                dashboard_port=_free_port() if dashboard else None,
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except Exception as error:  # Ray says no more precisely what it raises
        raise ServiceFailed(f"Ray did not start: {error}") from error


@contextlib.contextmanager
def any_agent_port() -> Iterator[None]:
    """In it, ``ray.init`` lets the agent that takes jobs listen on any free port.

    Ray's own choice is the same port for every cluster: of several on one machine, only the first would take jobs.
    """
    import ray._private.parameter

    parameter: Any = ray._private.parameter
    before = parameter.RayParams
    parameter.RayParams = functools.partial(before, dashboard_agent_listen_port=0)
    try:
        yield
    finally:
        parameter.RayParams = before


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _set_environment(directory: Path, proxy: str) -> None:
    """Must run before Ray is imported; its daemons and workers inherit it."""
    token = directory / "auth_token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    root = str(Path(__file__).resolve().parent.parent)
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
        "RAY_enable_metrics_collection": "0",
    }
    if proxy == "haproxy":
        os.environ |= haproxy_environment(directory)
        del os.environ["RAY_SERVE_ENABLE_DIRECT_INGRESS"]
