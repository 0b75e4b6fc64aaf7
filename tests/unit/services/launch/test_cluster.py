"""How a private cluster starts and what it leaves behind, Ray itself not started; how long a launcher waits for open
requests, and what signals do."""

from __future__ import annotations

import inspect
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray._private import parameter, services

from farsight.actors.runtime.names import RUN_DIR_VARIABLE
from farsight.core.messages.supervision import DrainProgress, DrainService
from farsight.services.launch import cluster, signals
from farsight.services.launch.cluster import ServiceFailed
from farsight.services.launch.signals import StopSignal, drain, first_dead
from farsight.services.launch.stages import Stages, StartTimedOut
from farsight.services.proxy.ports import free_ports, reserved_ports


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    found = tmp_path / "farsight-x"
    found.mkdir()
    (found / "log").touch()
    return found


def test_a_file_that_comes_while_the_directory_is_removed_goes_too(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removals: list[Path] = []
    remove = shutil.rmtree

    def removing(path: Path, **options: Any) -> None:
        remove(path, **options)
        if not removals:
            path.mkdir()
            (path / "late").touch()
        removals.append(path)

    monkeypatch.setattr(shutil, "rmtree", removing)
    cluster.remove_directory(directory)
    assert removals == [directory, directory]
    assert not directory.exists()


def test_a_directory_that_cannot_be_removed_holds_nobody_up(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "rmtree", lambda path, **options: None)
    monkeypatch.setattr(cluster, "_REMOVE_S", 0.01)
    cluster.remove_directory(directory)
    assert directory.exists()


def test_ray_prints_no_tracebacks_of_calls_that_nobody_waits_for(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = dict(os.environ)
    monkeypatch.setattr(os, "environ", found)
    cluster._set_environment(directory, "serve", range(0), None)
    assert found["RAY_IGNORE_UNHANDLED_ERRORS"] == "1"


def test_the_agents_of_ray_get_ports_that_nobody_else_of_the_cluster_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is left to them: the raylet waits for their choice, but not for long. The dashboard's does not start."""
    made: list[dict[str, Any]] = []
    started: list[list[str]] = []
    monkeypatch.setattr(parameter, "RayParams", lambda **settings: made.append(settings))
    monkeypatch.setattr(services, "start_ray_process", lambda command, *_, **settings: started.append(command))
    with reserved_ports() as ports:
        taken = free_ports(ports, 1)[0]
        with cluster.few_daemons(ports):
            parameter.RayParams(metrics_export_port=None, num_cpus=2)
            commands = ["--dashboard_agent_command=agent.py --port 1", "--runtime_env_agent_command=main.py"]
            services.start_ray_process(["raylet", *commands], "raylet", fate_share=True)
            services.start_ray_process(["gcs_server"], "gcs_server", fate_share=True)
            ray_services: Any = services
            assert ray_services.start_api_server(False, raise_on_failure=False) == ("", None)
        with cluster.few_daemons(ports, agents=True):
            services.start_ray_process(["raylet", *commands], "raylet", fate_share=True)
    (settings,) = made
    raylet, gcs, whole = started
    assert raylet[3:] == [f"--dashboard_agent_listen_port={settings['dashboard_agent_listen_port']}"]
    assert [(option.partition("=")[0], option.endswith("idle_agent.py")) for option in raylet[1:3]] == [
        ("--dashboard_agent_command", True),
        ("--runtime_env_agent_command", False),
    ]
    assert gcs == ["gcs_server"]
    assert whole[:3] == ["raylet", *commands]
    agents = [value for name, value in settings.items() if name.endswith("_port")]
    assert len(set(agents)) == len(agents) == 4
    assert set(agents) <= set(ports) - {taken}
    assert settings["num_cpus"] == 2


class Machine:
    """In the place of Ray: each try to start it takes a time, and fails or does not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *tries: tuple[float, Exception | None]) -> None:
        self.s = 0.0
        self.tries = list(tries)
        self.waits: list[float] = []
        self.ended: list[Path] = []
        monkeypatch.setattr(time, "monotonic", lambda: self.s)
        monkeypatch.setattr(cluster, "_try_ray", self._try)
        monkeypatch.setattr(cluster, "end_processes", self.ended.append)

    def _try(self, ports: range, wait_s: float, *, dashboard: bool) -> str:
        self.waits.append(wait_s)
        self.log.parent.mkdir(parents=True)  # fails where the last try has left its own
        self.log.write_text("the machine is slow\n")
        took_s, error = self.tries.pop(0)
        self.s += took_s
        if error is not None:
            raise error
        return "started"

    def start(self, directory: Path, patience_s: float = 600.0) -> tuple[Any, list[str]]:
        said: list[str] = []
        stages = Stages(said.append, patience_s, now=lambda: self.s)
        self.log = directory / "session_1" / "logs" / "raylet.out"
        (directory / "auth_token").write_text("secret")
        try:
            return cluster._start_ray(StopSignal(), stages, directory, range(0), dashboard=False), said
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


OVERLOADED = Exception("The current node timed out during startup.\nThe GCS has become overloaded.")


def test_a_start_that_lacks_time_is_cleaned_up_and_tried_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, (95, OVERLOADED), (31, OVERLOADED), (20, None))
    started, said = machine.start(directory)
    assert started == "started"
    assert machine.waits == [90, 180, 360]
    assert machine.ended == [directory, directory]
    assert said == [
        "Ray: did not start in 95 s (The current node timed out during startup. The GCS has become overloaded.); "
        "trying again with more time.",
        "Ray: did not start in 31 s (The current node timed out during startup. The GCS has become overloaded.); "
        "trying again with more time.",
        "Ray: started after 146.0 s.",
    ]


@pytest.mark.parametrize(
    ("patience_s", "took_s", "waits"), [(600, 95, [90, 180, 360]), (100, 95, [90, 5]), (2, 3, [2]), (91, 91, [90])]
)
def test_tries_end_with_the_patience(
    directory: Path, monkeypatch: pytest.MonkeyPatch, patience_s: float, took_s: float, waits: list[float]
) -> None:
    machine = Machine(monkeypatch, *[(took_s, OVERLOADED)] * 9)
    with pytest.raises(StartTimedOut, match="GCS has become overloaded") as failed:
        machine.start(directory, patience_s)
    assert machine.waits == waits
    assert failed.value.__notes__ == ["--- raylet.out\nthe machine is slow"]


@pytest.mark.parametrize("error", [OSError("No space left on device"), RuntimeError("Failed to start GCS.")])
def test_what_fails_at_once_is_not_tried_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    machine = Machine(monkeypatch, (3, error), (1, None))
    with pytest.raises(ServiceFailed, match=f"^Ray did not start: {error}") as failed:
        machine.start(directory)
    assert machine.waits == [90]
    assert machine.ended == [directory]
    assert failed.value.__notes__ == ["--- raylet.out\nthe machine is slow"]


def test_the_raylet_is_waited_for_as_long_as_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own wait of 30 s is a constant."""
    now, asked = 0.0, 0

    def slept(seconds: float) -> None:
        nonlocal now
        now += seconds

    def not_registered(*_: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked > 1000:
            return {"node": 1}
        raise RuntimeError("no such node")

    monkeypatch.setattr(services, "get_node", not_registered)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "sleep", slept)
    monkeypatch.setattr(cluster, "_raylet_lives", lambda: True)
    with cluster.patient_with_raylet(1000):
        assert services.get_node("address", "id") == {"node": 1}
    assert now > 30
    asked = 0
    with cluster.patient_with_raylet(10), pytest.raises(TimeoutError, match="has not registered for 10 s"):
        services.get_node("address", "id")
    monkeypatch.setattr(cluster, "_raylet_lives", lambda: False)
    with cluster.patient_with_raylet(10), pytest.raises(ConnectionError, match="raylet has ended"):
        services.get_node("address", "id")
    assert services.get_node is not_registered


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray Serve's own, as it is imported
def test_what_is_replaced_of_ray_is_there() -> None:
    """Another version of Ray may have other names; then these waits are its own again."""
    from ray._private import node
    from ray.serve._private import api, client

    assert "raylet_start_wait_time_s = 30" in inspect.getsource(node.Node.__init__)
    assert "ray._private.services.get_node(" in inspect.getsource(node.Node.__init__)
    assert callable(api._create_controller_and_proxy_refs) and callable(api._coerce_controller_options)
    assert callable(client.ServeControllerClient.wait_for_proxies_serving)


@pytest.mark.skipif(sys.platform != "linux", reason="the environment of other processes is read from /proc")
def test_processes_that_others_have_adopted_are_ended_too(directory: Path) -> None:
    """Those of this cluster, and no others."""
    orphans = [_orphan({RUN_DIR_VARIABLE: place}) for place in (str(directory), f"{directory}-other")]
    try:
        cluster.end_processes(directory)
        assert not psutil.pid_exists(orphans[0].pid) or orphans[0].status() == psutil.STATUS_ZOMBIE
        assert orphans[1].is_running()
    finally:
        orphans[1].kill()


def _orphan(environment: dict[str, str]) -> psutil.Process:
    code = (
        "import subprocess, sys;"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], stdout=-3, stderr=-3).pid)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return psutil.Process(int(done.stdout))


@pytest.fixture
def stop(monkeypatch: pytest.MonkeyPatch) -> Iterator[StopSignal]:
    monkeypatch.setattr(signals, "LAST_BYTES_S", 0.0)
    monkeypatch.setattr(signals, "LAST_ERRORS_S", 0.1)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    made = StopSignal()
    made.running()
    yield made
    for number, handler in before.items():
        signal.signal(number, handler)


def test_it_ends_when_no_request_is_open(stop: StopSignal) -> None:
    said: list[str] = []
    answers = [None, DrainProgress(2, False), DrainProgress(0, True)]
    orders: list[DrainService] = []

    def order(asked: DrainService) -> DrainProgress | None:
        orders.append(asked)
        return answers.pop(0)

    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.received and not stop.at_once
    drain(order, stop, 1000.0, 2, said.append)
    assert not answers and [each.num_ingress for each in orders] == [2, 2, 2]
    assert said[0].startswith("Draining: new requests are refused, open ones have 1000 s")
    assert said[1].startswith("Drained after ")


@pytest.mark.parametrize(
    ("answer", "words"), [(None, "what is open is not known"), (DrainProgress(7, False), "open requests: 7")]
)
def test_it_ends_when_the_time_is_over(stop: StopSignal, answer: DrainProgress | None, words: str) -> None:
    said: list[str] = []
    drain(lambda order: answer, stop, 0.0, 1, said.append)
    assert said[-1].startswith("Not drained after ") and words in said[-1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_it_at_once(stop: StopSignal, number: int) -> None:
    said: list[str] = []
    os.kill(os.getpid(), signal.SIGTERM)

    def order(asked: DrainService) -> DrainProgress:
        os.kill(os.getpid(), number)
        return DrainProgress(7, False)

    drain(order, stop, 1000.0, 1, said.append)
    assert said[-1] == "Not drained: a second signal came; open requests: 7."


def test_ctrl_c_alone_gives_no_time(stop: StopSignal) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    assert stop.received and stop.at_once


def test_a_daemon_that_has_ended_is_seen_before_and_after_it_is_reaped() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        processes = [psutil.Process(), psutil.Process(child.pid)]
        assert first_dead(processes) is None
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is not reaped
        assert first_dead(processes) is processes[1]
        child.wait()
        assert first_dead(processes) is processes[1]
