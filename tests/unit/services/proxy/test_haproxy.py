"""The settings of HAProxy and of Ray behind it, ports that a service has for itself, and one that stands still."""

from __future__ import annotations

import contextlib
import itertools
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from farsight.core.config.server import ServerConfig
from farsight.core.errors import FarsightError
from farsight.services.proxy import ports
from farsight.services.proxy.haproxy import (
    IDLE_PROBES,
    PROXY_DIRECTORY_VARIABLE,
    STOPPED_PROBES,
    Silence,
    choose_proxy,
    haproxy_environment,
    max_connections,
)
from farsight.services.proxy.ports import BLOCK_SIZE, FIRST_PORT, NUM_BLOCKS, free_ports, reserved_ports
from tests.free_ports import free_port

LONG_S = 120.0

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="Ray brings HAProxy for Linux only")


@on_linux
def test_ray_serves_behind_it_on_ports_of_the_service_alone(tmp_path: Path) -> None:
    with reserved_ports() as ports:
        environment = haproxy_environment(tmp_path, ports)
    first, stop = (int(environment[f"RAY_SERVE_DIRECT_INGRESS_{name}_HTTP_PORT"]) for name in ("MIN", "MAX"))
    assert set(range(first, stop)) <= set(ports)
    assert environment[PROXY_DIRECTORY_VARIABLE] == str(tmp_path)
    assert (environment["RAY_SERVE_ENABLE_HA_PROXY"], environment["RAY_SERVE_ENABLE_DIRECT_INGRESS"]) == ("0", "1")


@on_linux
@pytest.mark.parametrize(
    ("files", "connections"), [(20_000, 7800), (1_000_000, 30_000), (resource.RLIM_INFINITY, 30_000), (600, 100)]
)
def test_connections_are_bounded_by_the_files_that_may_be_open(
    files: int, connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, files))
    assert max_connections() == connections


@on_linux
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="util-linux's setpriv is not installed")
def test_it_ends_with_the_process_that_keeps_it(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from farsight.core.config.server import ServerConfig\n"
        "from farsight.services.proxy.haproxy import HAProxyRunner\n"
        f"HAProxyRunner(Path({str(tmp_path)!r}), ServerConfig(port={free_port()}), list).start(); time.sleep(1000)"
    )
    found: list[psutil.Process] = []
    with subprocess.Popen([sys.executable, "-c", code]) as runner:

        def started() -> bool:
            children = psutil.Process(runner.pid).children()
            found[:] = [child for child in children if Path(child.exe()).name == "haproxy"]  # ``setpriv`` becomes it
            return bool(found)

        try:
            _until(lambda: started() or runner.poll() is not None)
        finally:
            runner.kill()
    (haproxy,) = found
    _until(lambda: _has_ended(haproxy))


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _has_ended(process: psutil.Process) -> bool:
    """Also where no caller asks how: not every container's first process takes in orphans."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@on_linux
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "192.0.2.1"])
def test_it_is_taken_on_every_address(host: str) -> None:
    assert choose_proxy(ServerConfig(host=host)) == "haproxy"
    assert choose_proxy(ServerConfig(host=host, proxy="serve")) == "serve"


@pytest.mark.parametrize(("stopped", "num_probes"), [(True, STOPPED_PROBES), (False, IDLE_PROBES)])
def test_a_process_that_is_stopped_is_stuck_soon_and_one_that_runs_no_instruction_later(
    stopped: bool, num_probes: int
) -> None:
    silence = Silence()
    found = [silence.is_stuck(7, False, lambda _: (stopped, 1.5)) for _ in range(num_probes)]
    assert found == [False] * (num_probes - 1) + [True]


def test_a_busy_process_is_never_stuck_however_long_it_is_silent() -> None:
    silence = Silence()
    used = itertools.count()
    assert not any(silence.is_stuck(7, False, lambda _: (False, 0.01 * next(used))) for _ in range(1000))


def test_an_answer_or_another_process_begins_the_count_again() -> None:
    silence = Silence()
    for _ in range(10):
        assert not silence.is_stuck(7, False, lambda _: (True, 1.5))
        assert not silence.is_stuck(7, True, lambda _: (True, 1.5))
    for pid in range(10, 20):
        assert not silence.is_stuck(pid, False, lambda _: (True, 1.5))


HOLDER = """
from farsight.services.proxy.ports import reserved_ports
with reserved_ports() as ports:
    print(ports[0], flush=True)
    input()
"""


def test_services_that_start_at_once_share_no_port() -> None:
    """In processes of their own, since that is where they live."""
    holders = [
        subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    try:
        firsts = [int(holder.stdout.readline()) for holder in holders if holder.stdout is not None]
    finally:
        for holder in holders:
            holder.communicate("\n", timeout=200)
    assert len({(first - FIRST_PORT) // BLOCK_SIZE for first in firsts}) == 3


def three_blocks() -> int:
    """Where three free blocks begin, below the ports that Ray gives its workers."""
    for first in range(4_000, 9_000, 3 * BLOCK_SIZE):
        with contextlib.suppress(FarsightError):
            return free_ports(range(first, first + 3 * BLOCK_SIZE, BLOCK_SIZE), 3)[0]
    raise AssertionError("too many programs listen on this machine")


def test_they_are_given_back_and_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    # Services that run beside this test keep theirs.
    begin = three_blocks()
    monkeypatch.setattr(ports, "FIRST_PORT", begin)
    monkeypatch.setattr(ports, "NUM_BLOCKS", 3)
    with ExitStack() as stack:
        blocks = [stack.enter_context(reserved_ports()) for _ in range(3)]
        assert len({port for block in blocks for port in block}) == 3 * (BLOCK_SIZE - 1)
        with pytest.raises(FarsightError, match=f"no free block of 150 ports between {begin} and {begin + 449}"):
            stack.enter_context(reserved_ports())
    with reserved_ports():
        pass


def test_the_port_of_the_service_itself_is_not_among_them() -> None:
    wanted = FIRST_PORT + 7 * BLOCK_SIZE + 1
    for _ in range(5 * NUM_BLOCKS):
        with reserved_ports(avoid=wanted) as found:
            assert wanted not in found


def test_a_port_that_somebody_listens_on_is_not_free() -> None:
    with reserved_ports() as found, socket.socket() as taken:
        taken.bind(("127.0.0.1", free_ports(found, 1)[0]))
        taken.listen()
        assert taken.getsockname()[1] not in free_ports(found, 3)
        with pytest.raises(FarsightError, match="2 free ports are needed, 0 were found"):
            free_ports([taken.getsockname()[1]], 2)
