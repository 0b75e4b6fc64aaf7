"""The settings of HAProxy and of Ray behind it."""

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
from services.proxy.haproxy import (
    PROXY_DIRECTORY_VARIABLE,
    RAY_PORT_VARIABLE,
    choose_proxy,
    haproxy_environment,
    max_connections,
)
from services.proxy.ports import reserved_ports
from tests.free_ports import free_port

LONG_S = 120.0

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Ray brings HAProxy for Linux only")


def test_ray_serves_behind_it_on_ports_of_the_service_alone(tmp_path: Path) -> None:
    with reserved_ports() as ports:
        environment = haproxy_environment(tmp_path, ports)
    own = int(environment[RAY_PORT_VARIABLE])
    first, stop = (int(environment[f"RAY_SERVE_DIRECT_INGRESS_{name}_HTTP_PORT"]) for name in ("MIN", "MAX"))
    assert own not in range(first, stop)
    assert {own, *range(first, stop)} <= set(ports)
    assert environment[PROXY_DIRECTORY_VARIABLE] == str(tmp_path)
    assert (environment["RAY_SERVE_ENABLE_HA_PROXY"], environment["RAY_SERVE_ENABLE_DIRECT_INGRESS"]) == ("0", "1")


@pytest.mark.parametrize(
    ("files", "connections"), [(20_000, 7800), (1_000_000, 30_000), (resource.RLIM_INFINITY, 30_000), (600, 100)]
)
def test_connections_are_bounded_by_the_files_that_may_be_open(
    files: int, connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, files))
    assert max_connections() == connections


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="util-linux's setpriv is not installed")
def test_it_ends_with_the_process_that_keeps_it(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from core.config.server import ServerConfig\n"
        "from services.proxy.haproxy import HAProxyKeeper\n"
        f"HAProxyKeeper(Path({str(tmp_path)!r}), ServerConfig(port={free_port()}), list).start(); time.sleep(1000)"
    )
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
    """Once it is there; ``setpriv`` becomes it."""
    deadline = time.monotonic() + LONG_S
    while not (found := [child for child in parent.children() if Path(child.exe()).name == name]):
        assert parent.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline
        time.sleep(0.01)
    return found[0]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "192.0.2.1"])
def test_it_is_taken_on_every_address(host: str) -> None:
    assert choose_proxy(ServerConfig(host=host)) == "haproxy"
    assert choose_proxy(ServerConfig(host=host, proxy="serve")) == "serve"
