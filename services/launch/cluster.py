"""A private Ray cluster: started for one command, closed to other users, ended with the command."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from farsight.actors.runtime.names import NAMESPACE, RUN_DIR_VARIABLE
from farsight.core.config.server import AccessConfig, ServerConfig
from farsight.core.errors import FarsightError
from farsight.core.processors import usable_processors
from farsight.services.launch.access import write_tls_file
from farsight.services.launch.signals import StopSignal, watched_daemons
from farsight.services.launch.stages import Stages, StartTimedOut
from farsight.services.proxy.haproxy import haproxy_environment
from farsight.services.proxy.ports import free_ports, reserved_ports
from farsight.services.proxy.timed_http import LIMITS_VARIABLE, ConnectionLimits
from farsight.services.run_file import ADMIN_TOKEN_VARIABLE

OBJECT_STORE_BYTES = 128 * 1024 * 1024

MAX_TRIES = 3

FIRST_WAIT_S = 90.0
"""Seconds that the first try to start Ray waits for its daemons; each further try waits twice as long."""

HURRIED_S = 15.0
"""A try that fails sooner (seconds) did not lack time, so a second try would fail as well."""

_AGENT_WAIT_S = 120.0
_LEAST_WAIT_S = 1.0
_END_S = 5.0
_REMOVE_S = 2.0
_LOOK_S = 0.05

_DAEMON_LOGS = ("gcs_server", "raylet", "dashboard.", "runtime_env_agent")
_LOG_LINES = 40

_JOB_AGENT_PORT = "dashboard_agent_listen_port"
_AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", _JOB_AGENT_PORT, "runtime_env_agent_port")
"""Ray's names of its agents' ports."""

_DASHBOARD_AGENT = "--dashboard_agent_command"
"""Option with which a raylet is told how to start the dashboard's agent.

Ray's other agent stays: a raylet ends without it as soon as a driver or a job has a runtime environment.
"""

_IDLE_AGENT = Path(__file__).with_name("idle_agent.py")


class ServiceFailed(FarsightError):
    """A component that the whole service depends on has died."""


@dataclass(frozen=True, slots=True)
class PrivateCluster:
    """A running private cluster; ``dashboard_url`` serves Ray's Jobs API and is empty without a dashboard."""

    dashboard_url: str


@contextlib.contextmanager
def private_cluster(
    stop: StopSignal,
    *,
    stages: Stages,
    proxy: str = "serve",
    server: ServerConfig | None = None,
    access: AccessConfig | None = None,
    dashboard: bool = False,
) -> Iterator[PrivateCluster]:
    """A private Ray cluster with token auth, in a temporary directory and on ports of its own.

    Args:
        stop: Signals that abandon the start.
        stages: The stages of the start; Ray's becomes the first.
        proxy: Proxy of Ray Serve: ``serve`` or ``haproxy``.
        server: Address and port of the proxy, and limits of its connections; None without a proxy.
        access: TLS of the proxy.
        dashboard: Whether to start Ray's dashboard, with the Jobs API.

    Raises:
        StartTimedOut: The start took longer than ``server.start_patience_s``.
        FarsightError: The cluster cannot start.
    """
    with reserved_ports(avoid=server.port if server else 0) as ports:
        directory = Path(tempfile.mkdtemp(prefix="farsight-"))
        stop.starting(lambda: _end_all(directory))
        _set_environment(directory, proxy, ports, server)
        if proxy == "haproxy" and access is not None:
            write_tls_file(access, directory)
        import ray

        try:
            context = _start_ray(stop, stages, directory, ports, dashboard=dashboard)
            with watched_daemons(lambda dead: _abandon(stop, dead)):
                yield PrivateCluster(f"http://{context.dashboard_url}" if dashboard else "")
        finally:
            ray.shutdown()
            _end_all(directory)


def _end_all(directory: Path) -> None:
    end_processes(directory)
    remove_directory(directory)


def _abandon(stop: StopSignal, dead: str) -> None:
    """Ends this process with status 1, because a cluster without one of its daemons replaces nothing that dies.

    Calls of Ray may never return now, so the main thread is not asked.
    """
    sys.stdout.flush()
    sys.stderr.write(f"farsight: {dead}, has died; no process that dies would be replaced, so everything ends\n")
    sys.stderr.write("farsight: What to do: run the same command again.\n")
    sys.stderr.flush()
    stop.abandon(1)


def remove_directory(directory: Path) -> None:
    """Removes the directory, with retries: a process that is about to end may still write a file there."""
    deadline = time.monotonic() + _REMOVE_S
    while True:
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists() or time.monotonic() > deadline:
            return
        time.sleep(_LOOK_S)


def end_processes(directory: Path) -> None:
    """Kills every process of the cluster in that directory, including adopted ones."""
    deadline = time.monotonic() + _END_S
    while (left := _processes_of(directory)) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=max(0.0, deadline - time.monotonic()))


def _processes_of(directory: Path) -> list[psutil.Process]:
    """The processes with the directory in their environment, without this one, which set it after its start."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # A process of another user, or about to end.
            if process.pid != os.getpid() and process.environ().get(RUN_DIR_VARIABLE) == str(directory):
                found.append(process)
    return found


def _start_ray(stop: StopSignal, stages: Stages, directory: Path, ports: range, *, dashboard: bool) -> Any:
    """Starts Ray, and retries with more time for its daemons if a try ran out of time.

    No process and no file of Ray is left between two tries.
    """
    with stages.stage("Ray", lambda: "its daemons"):
        for number in range(1, MAX_TRIES + 1):
            wait_s = max(_LEAST_WAIT_S, min(FIRST_WAIT_S * 2 ** (number - 1), stages.remaining_s))
            began = time.monotonic()
            try:
                return _try_ray(ports, wait_s, dashboard=dashboard)
            except Exception as error:  # Ray does not document its exceptions more precisely.
                took_s = time.monotonic() - began
                failure = _ray_failure(error, took_s, hurried=took_s >= min(HURRIED_S, wait_s))
                failure.add_note(_last_logs(directory))
                _clear(directory)
                if number == MAX_TRIES or stages.remaining_s <= 0 or not isinstance(failure, StartTimedOut):
                    raise failure from error
                stages.say(f"{failure}; trying again with more time.")
            finally:
                stop.install()  # Ray installs its own TERM handler.
    raise AssertionError("the last try returns or raises")


def _ray_failure(error: Exception, took_s: float, *, hurried: bool) -> FarsightError:
    reason = " ".join(str(error).split()) or type(error).__name__
    if hurried:
        return StartTimedOut(f"Ray: did not start in {took_s:.0f} s ({reason})")
    return ServiceFailed(f"Ray did not start: {reason}")


def _clear(directory: Path) -> None:
    """Removes the processes and files of a failed try."""
    import ray

    ray.shutdown()
    end_processes(directory)
    for path in (each for each in directory.iterdir() if each.is_dir()):
        remove_directory(path)


def _try_ray(ports: range, wait_s: float, *, dashboard: bool) -> Any:
    import ray

    # Time that Ray's daemons wait for each other; Ray's default is 30 s.
    os.environ |= {
        "RAY_agent_register_timeout_ms": str(int(1000 * max(_AGENT_WAIT_S, wait_s))),
        "RAY_gcs_server_port_wait_time_s": str(int(wait_s)),
    }
    with few_daemons(ports, agents=dashboard), patient_with_raylet(wait_s):
        return ray.init(
            address="local",
            namespace=NAMESPACE,
            num_cpus=usable_processors(),  # Ray respects CPU quotas, but not affinity masks.
            include_dashboard=dashboard,
            dashboard_port=free_ports(ports, 1)[0] if dashboard else None,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )


@contextlib.contextmanager
def patient_with_raylet(wait_s: float) -> Iterator[None]:
    """Inside this context, ``ray.init`` waits ``wait_s`` for its raylet to register, as long as the raylet lives.

    Ray 2.60 waits a constant 30 s and polls without a pause, which takes a CPU core from the processes that it waits
    for. This context replaces the polling function by one with the longer limit and pauses.
    """
    import ray._private.services

    services: Any = ray._private.services
    before = services.get_node

    def get_node(*asked: Any) -> Any:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                return before(*asked)
            except RuntimeError as error:  # The raylet has not registered yet.
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
    """The last log lines of Ray's daemons for the failure log, since their files are removed with the directory."""
    found = []
    for path in sorted(directory.rglob("session_*/logs/*")):
        if path.name.startswith(_DAEMON_LOGS) and path.is_file():
            lines = path.read_text("utf-8", errors="replace").splitlines()[-_LOG_LINES:]
            found += [f"--- {path.name}", *lines] if lines else []
    return "\n".join(found)


@contextlib.contextmanager
def few_daemons(ports: range, *, agents: bool = False) -> Iterator[None]:
    """Inside this context, ``ray.init`` skips daemons that a single machine does not need, for a faster start.

    Skipped are the autoscaler, which finds more machines, the log monitor, which prints the output of workers, the
    dashboard's server, for which Ray waits also where no dashboard is wanted, and the agent that serves the dashboard,
    its Jobs API and its metrics.
    Ray's agents also get ports of this cluster alone. By default the job agent has the same port in every cluster, so
    that only the first of several clusters on one machine would accept jobs. The raylet ends if it has to wait more
    than 15 s for a port that an agent chooses, a constant of Ray 2.60 that a busy machine exceeds. ``ray.init`` tells
    the raylet every agent's port but the job agent's, so this context adds that one.

    Args:
        ports: Ports of this cluster alone. The agents take the last ones; other users begin with the first.
        agents: Whether the dashboard's server and its agent are needed, as for the Jobs API.
    """
    import ray._private.parameter
    import ray._private.services
    from ray._private.ray_constants import PROCESS_TYPE_RAYLET

    parameter: Any = ray._private.parameter
    services: Any = ray._private.services
    make_before, start_before, serve_before = parameter.RayParams, services.start_ray_process, services.start_api_server
    told = dict(zip(_AGENT_PORTS, free_ports(reversed(ports), len(_AGENT_PORTS)), strict=True))

    def make(**settings: Any) -> Any:
        return make_before(**settings | told | {"no_monitor": True, "include_log_monitor": False})

    def start(command: list[str], process_type: str, **settings: Any) -> Any:
        if process_type == PROCESS_TYPE_RAYLET:
            words = command if agents else map(_with_idle_agent, command)
            command = [*words, f"--{_JOB_AGENT_PORT}={told[_JOB_AGENT_PORT]}"]
        return start_before(command, process_type, **settings)

    parameter.RayParams, services.start_ray_process = make, start
    if not agents:
        services.start_api_server = lambda *asked, **settings: ("", None)  # no address, no process
    try:
        yield
    finally:
        parameter.RayParams, services.start_ray_process = make_before, start_before
        services.start_api_server = serve_before


def _with_idle_agent(option: str) -> str:
    """Returns an option of a raylet, with ``idle_agent`` in place of the dashboard's agent."""
    name = option.partition("=")[0]
    if name != _DASHBOARD_AGENT:
        return option
    # Isolated and without site: not even what an environment adds to every start of Python.
    return f"{name}={subprocess.list2cmdline([sys.executable, '-I', '-S', str(_IDLE_AGENT)])}"


def _set_environment(directory: Path, proxy: str, ports: range, server: ServerConfig | None) -> None:
    """Sets the environment; must run before Ray is imported, since its daemons and workers inherit it."""
    token = directory / "auth_token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    root = str(Path(__file__).absolute().parents[3])
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
        # A call whose caller has stopped waiting may fail with its callee; Ray would print a traceback on the console.
        "RAY_IGNORE_UNHANDLED_ERRORS": "1",
        # One event loop per replica avoids a thread hop per token. The ingress never blocks its loop.
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
        # Kill a hung replica; otherwise it and its clients would get the time of a draining replica.
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
        # Ray kills a proxy that is not up after three times this value; its default 5 s is too short on a busy machine.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        "RAY_enable_metrics_collection": "0",
        # Nothing here reads Ray's metrics of Serve (ten a second), its events of tasks and its statistics of handlers.
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "10000",
        "RAY_task_events_report_interval_ms": "0",
        "RAY_event_stats": "0",
        # The raylet looks ten times a second for resources, objects and idle workers that never change here.
        "RAY_raylet_report_resources_period_milliseconds": "500",
        "RAY_raylet_check_gc_period_milliseconds": "1000",
        "RAY_kill_idle_workers_interval_ms": "1000",
        "RAY_object_manager_timer_freq_ms": "1000",
        "RAY_local_fs_monitor_interval_ms": "1000",
        "RAY_memory_monitor_refresh_ms": "1000",
        # Ray adds 15 to the niceness of its workers, which then wait for every other process of the machine, and the
        # threads of a step for the one that waits.
        "RAY_worker_niceness": "0",
        # Time for Ray's processes to find each other; with Ray's 5, 60 and 60 s they give up on a busy machine.
        "RAY_gcs_rpc_server_connect_timeout_s": "20",
        "RAY_worker_register_timeout_seconds": "240",
        "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "240",
    }
    if proxy == "haproxy":
        os.environ |= haproxy_environment(directory, ports)
    else:
        os.environ["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] = "farsight.services.proxy.proxy_errors.middlewares"
        limits = None if server is None else ConnectionLimits.of(server)
        os.environ[LIMITS_VARIABLE] = "" if limits is None else limits.to_json()
