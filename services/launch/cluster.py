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

import psutil

from actors.runtime.names import NAMESPACE, RUN_DIR_VARIABLE
from core.errors import FarsightError
from core.processors import usable_processors
from services.launch.signals import StopSignal
from services.launch.stages import Stages, StartTimedOut
from services.proxy.haproxy import haproxy_environment
from services.proxy.ports import free_ports, reserved_ports
from services.run_file import ADMIN_TOKEN_VARIABLE

OBJECT_STORE_BYTES = 128 * 1024 * 1024

MAX_TRIES = 3

FIRST_WAIT_S = 90.0
"""How long the first try to start Ray waits for its daemons; each further one waits twice as long."""

HURRIED_S = 15.0
"""A try that fails sooner was not short of time: another one would fail as well."""

_AGENT_WAIT_S = 120.0
_LEAST_WAIT_S = 1.0
_END_S = 5.0
_REMOVE_S = 2.0
_LOOK_S = 0.05

_DAEMON_LOGS = ("gcs_server", "raylet", "dashboard.", "runtime_env_agent")
_LOG_LINES = 40

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
    stop: StopSignal, *, stages: Stages, proxy: str = "serve", port: int = 0, dashboard: bool = False
) -> Iterator[Cluster]:
    """A Ray cluster of our own with token auth, in a temporary directory and on ports that go with it.

    Args:
        stop: Its signals abandon the start.
        stages: Where Ray's is added, the first of the start.
        proxy: Of Ray Serve: ``serve`` or ``haproxy``.
        port: Where that is to listen; 0 if there is none.
        dashboard: Whether to start Ray's dashboard, with the Jobs API.

    Raises:
        StartTimedOut: the patience is over.
        FarsightError: it cannot start.
    """
    with reserved_ports(avoid=port) as ports:
        directory = Path(tempfile.mkdtemp(prefix="farsight-"))
        stop.starting(lambda: remove_directory(directory))
        _set_environment(directory, proxy, ports)
        import ray

        try:
            context = _start_ray(stop, stages, directory, ports, dashboard=dashboard)
            yield Cluster(f"http://{context.dashboard_url}" if dashboard else "")
        finally:
            ray.shutdown()
            end_processes(directory)
            remove_directory(directory)


def remove_directory(directory: Path) -> None:
    """Tries for a while: a process that is about to end may write one more file there meanwhile."""
    deadline = time.monotonic() + _REMOVE_S
    while True:
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists() or time.monotonic() > deadline:
            return
        time.sleep(_LOOK_S)


def end_processes(directory: Path) -> None:
    """Kills every process of the cluster in that directory, also those that another process has adopted."""
    deadline = time.monotonic() + _END_S
    while (left := _processes_of(directory)) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=max(0.0, deadline - time.monotonic()))


def _processes_of(directory: Path) -> list[psutil.Process]:
    """Those that have the directory in their environment; this one has not, since it was set after its start."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # of another user, or about to end
            if process.pid != os.getpid() and process.environ().get(RUN_DIR_VARIABLE) == str(directory):
                found.append(process)
    return found


def _start_ray(stop: StopSignal, stages: Stages, directory: Path, ports: range, *, dashboard: bool) -> Any:
    """Tries again, with more time for Ray's daemons, where time is what a try was short of.

    Between two tries no process is left, and no file of Ray.
    """
    with stages.stage("Ray", lambda: "its daemons"):
        for number in range(1, MAX_TRIES + 1):
            wait_s = max(_LEAST_WAIT_S, min(FIRST_WAIT_S * 2 ** (number - 1), stages.remaining_s))
            began = time.monotonic()
            try:
                return _try_ray(ports, wait_s, dashboard=dashboard)
            except Exception as error:  # Ray says no more precisely what it raises
                took_s = time.monotonic() - began
                failure = _ray_failure(error, took_s, hurried=took_s >= min(HURRIED_S, wait_s))
                failure.add_note(_last_logs(directory))
                _clear(directory)
                if number == MAX_TRIES or stages.remaining_s <= 0 or not isinstance(failure, StartTimedOut):
                    raise failure from error
                stages.say(f"{failure}; it is tried again, with more time.")
            finally:
                stop.install()  # Ray takes TERM for itself
    raise AssertionError("the last try returns or raises")


def _ray_failure(error: Exception, took_s: float, *, hurried: bool) -> FarsightError:
    reason = " ".join(str(error).split()) or type(error).__name__
    if hurried:
        return StartTimedOut(f"Ray: did not start in {took_s:.0f} s ({reason})")
    return ServiceFailed(f"Ray did not start: {reason}")


def _clear(directory: Path) -> None:
    """Leaves no process of a try that failed, and no file of Ray."""
    import ray

    ray.shutdown()
    end_processes(directory)
    for path in (each for each in directory.iterdir() if each.is_dir()):
        remove_directory(path)


def _try_ray(ports: range, wait_s: float, *, dashboard: bool) -> Any:
    import ray

    # How long Ray's daemons wait for each other, which is 30 s unless told.
    os.environ |= {
        "RAY_agent_register_timeout_ms": str(int(1000 * max(_AGENT_WAIT_S, wait_s))),
        "RAY_gcs_server_port_wait_time_s": str(int(wait_s)),
    }
    with few_daemons(ports), patient_with_raylet(wait_s):
        return ray.init(
            address="local",
            namespace=NAMESPACE,
            num_cpus=usable_processors(),  # Ray knows of quotas, but not of affinity masks
            include_dashboard=dashboard,
            dashboard_port=free_ports(ports, 1)[0] if dashboard else None,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )


@contextlib.contextmanager
def patient_with_raylet(wait_s: float) -> Iterator[None]:
    """In it, ``ray.init`` waits so long for its raylet to register, as long as that lives.

    Ray 2.60 waits 30 s, a constant, and meanwhile asks without a pause, which takes a processor from those that it
    waits for. The function that it asks with is replaced here by one that has the patience and pauses.
    """
    import ray._private.services

    services: Any = ray._private.services
    before = services.get_node

    def get_node(*asked: Any) -> Any:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                return before(*asked)
            except RuntimeError as error:  # it has not registered yet
                if not _raylet_lives():
                    raise ConnectionError("the raylet has ended") from error
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the raylet has not registered for {wait_s:.0f} s") from error
            time.sleep(_LOOK_S)

    services.get_node = get_node
    try:
        yield
    finally:
        services.get_node = before


def _raylet_lives() -> bool:
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if child.name() == "raylet" and child.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def _last_logs(directory: Path) -> str:
    """The last lines that Ray's daemons wrote, for the log of a failure: their files go with the directory."""
    found = []
    for path in sorted(directory.rglob("session_*/logs/*")):
        if path.name.startswith(_DAEMON_LOGS) and path.is_file():
            lines = path.read_text("utf-8", errors="replace").splitlines()[-_LOG_LINES:]
            found += [f"--- {path.name}", *lines] if lines else []
    return "\n".join(found)


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
        RUN_DIR_VARIABLE: str(directory),
        ADMIN_TOKEN_VARIABLE: os.environ.get(ADMIN_TOKEN_VARIABLE) or secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        # On one machine only: the address of every node is 127.0.0.1, so no daemon of Ray listens elsewhere.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        # One event loop a replica: no thread hop a token. The ingress never blocks its loop.
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "1",
        # A replica that hangs is killed: else it would have the time of one that drains, its clients with it.
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
        # Ray kills a proxy that is not up after three times so long; with its 5 s no service starts on a busy machine.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        "RAY_enable_metrics_collection": "0",
        # How long its processes may take to find each other; with Ray's 5, 60 and 60 s they end on a busy machine.
        "RAY_gcs_rpc_server_connect_timeout_s": "20",
        "RAY_worker_register_timeout_seconds": "240",
        "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "240",
    }
    if proxy == "haproxy":
        os.environ |= haproxy_environment(directory, ports)
        del os.environ["RAY_SERVE_ENABLE_DIRECT_INGRESS"]
    else:
        os.environ["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] = "services.proxy.proxy_errors.middlewares"
