"""The settings under which Ray starts HAProxy."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from core.config.server import ServerConfig
from services.ingress.liveness import publish
from services.proxy.haproxy import PROXY_DIRECTORY_VARIABLE, choose_proxy, haproxy_environment, max_connections
from services.proxy.ports import reserved_ports

LONG_S = 120.0

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Ray brings HAProxy for Linux only")


def test_all_files_lie_in_the_directory_and_all_ports_differ(tmp_path: Path) -> None:
    with reserved_ports() as ports:
        environment = haproxy_environment(tmp_path, ports)
    listens = [int(value) for name, value in environment.items() if name.endswith("_PORT") and "INGRESS" not in name]
    first, stop = (int(environment[f"RAY_SERVE_DIRECT_INGRESS_{name}_HTTP_PORT"]) for name in ("MIN", "MAX"))
    replicas = range(first, stop)
    assert len({*listens, *replicas}) == 3 + len(replicas)
    assert {*listens, *replicas} <= set(ports)
    places = [name for name in environment if name.endswith(("_PATH", "_LOC", "_FILE", "_BASE"))]
    assert len(places) == 6
    assert all(environment[name].startswith(str(tmp_path)) for name in places)


@pytest.mark.parametrize(
    ("files", "connections"), [(20_000, 7800), (1_000_000, 30_000), (resource.RLIM_INFINITY, 30_000), (600, 100)]
)
def test_connections_are_bounded_by_the_files_that_may_be_open(
    files: int, connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, files))
    assert max_connections() == connections


def _write_config(environment: dict[str, str], path: Path, listen: str) -> Path:
    """As Ray does, with one more address to listen on."""
    metrics, stats = (environment[f"RAY_SERVE_HAPROXY_{name}_PORT"] for name in ("METRICS", "STATS"))
    path.write_text(
        f"defaults\n    mode http\n    timeout client 1s\n    timeout server 1s\n    timeout connect 1s\n"
        f"frontend prometheus\n    bind :{metrics}\nfrontend http_frontend\n    bind {listen}\n"
        f"listen stats\n  bind *:{stats}\n"
    )
    return path


def test_the_wrapper_moves_the_frontend_to_its_address_and_the_statistics_to_loopback(
    tmp_path: Path,
) -> None:
    with reserved_ports() as ports:
        environment = haproxy_environment(tmp_path, ports, "0.0.0.0")
    written = _write_config(environment, tmp_path / "haproxy.cfg", "127.0.0.1:8000")
    # With -c it only checks the file.
    assert (
        subprocess.run(
            [environment["RAY_SERVE_HAPROXY_BINARY_PATH"], "-c", "-f", str(written)], capture_output=True, timeout=200
        ).returncode
        == 0
    )
    metrics, stats = (environment[f"RAY_SERVE_HAPROXY_{name}_PORT"] for name in ("METRICS", "STATS"))
    binds = [line.strip() for line in written.read_text().splitlines() if "bind" in line]
    assert binds == [f"bind 127.0.0.1:{metrics}", "bind *:8000", f"bind 127.0.0.1:{stats}"]


def test_the_wrapper_has_a_replica_checked_where_it_published_its_life(tmp_path: Path) -> None:
    """Ray writes the file into a folder of the node."""
    with reserved_ports() as ports:
        environment = haproxy_environment(tmp_path, ports)
    publish(4321, "abc", Path(environment[PROXY_DIRECTORY_VARIABLE]))
    (tmp_path / "node").mkdir()
    written = _write_config(environment, tmp_path / "node" / "haproxy.cfg", "127.0.0.1:8000")
    server = "    server SERVE_REPLICA_farsight-Ingress-abc 127.0.0.1:30001 check"
    with written.open("a") as file:
        file.write(f"frontend more\n    bind 127.0.0.1:8001\n    use_backend work\nbackend work\n{server}\n")
    check = [environment["RAY_SERVE_HAPROXY_BINARY_PATH"], "-c", "-f", str(written)]
    assert subprocess.run(check, capture_output=True, timeout=200).returncode == 0
    assert f"{server} port 4321\n" in written.read_text()


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="util-linux's setpriv is not installed")
def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    with reserved_ports() as ports:
        environment = haproxy_environment(tmp_path, ports)
        address = f"127.0.0.1:{environment['RAY_SERVE_FALLBACK_PROXY_HTTP_PORT']}"
        written = _write_config(environment, tmp_path / "haproxy.cfg", address)
        command = [environment["RAY_SERVE_HAPROXY_BINARY_PATH"], "-db", "-f", str(written)]
        code = f"import subprocess; subprocess.Popen({command}).wait()"
        with subprocess.Popen([sys.executable, "-c", code]) as parent:
            try:
                haproxy = _child_called("haproxy", psutil.Process(parent.pid))
            finally:
                parent.kill()
    deadline = time.monotonic() + LONG_S
    while not _has_ended(haproxy):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _has_ended(process: psutil.Process) -> bool:
    """Also where no caller asks how: not every container's first process takes in orphans."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _child_called(name: str, parent: psutil.Process) -> psutil.Process:
    """Once it is there; the script before it has that name too, but is another program."""
    deadline = time.monotonic() + LONG_S
    while not (found := [child for child in parent.children() if Path(child.exe()).name == name]):
        assert parent.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline
        time.sleep(0.01)
    return found[0]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "192.0.2.1"])
def test_it_is_taken_on_every_address(host: str) -> None:
    assert choose_proxy(ServerConfig(host=host)) == "haproxy"
    assert choose_proxy(ServerConfig(host=host, proxy="serve")) == "serve"
