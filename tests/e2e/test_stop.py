"""Ctrl-C: everything is gone in the time that is promised, the server's files with it."""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path

import httpx
import psutil
import pytest

from services.launch.launch import EMBEDDED_NAME
from tests.e2e.server import LONG_S, STOP_TIMEOUT_S, Server, spawn_server, start_server, wait_until
from tests.e2e.test_hygiene import check_listeners, environment

pytestmark = pytest.mark.alone


def body(num_tokens: int) -> dict[str, object]:
    return {"model": EMBEDDED_NAME, "prompt": "x", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}


@pytest.mark.parametrize(("placement", "proxy"), [("fused", "haproxy"), ("split", "serve")])
def test_ctrl_c_under_load_stops_everything_in_time(tmp_path: Path, placement: str, proxy: str) -> None:
    server = start_server(tmp_path / "log", "--placement", placement, "--proxy", proxy)
    directory = Path(environment(server)["RAY_TMPDIR"])
    assert directory.stat().st_mode & 0o077 == 0
    if proxy == "haproxy":
        check_listeners(server)
        ours = f"no haproxy of {directory}"  # Ray may just be replacing it by one that knows more
        wait_until(lambda: any(str(directory) in command for command in commands(server, "haproxy")), ours)
    with httpx.Client(base_url=server.base_url, timeout=LONG_S) as client:
        with client.stream("POST", "/v1/completions", json=body(8)) as reply:
            assert [line for line in reply.iter_lines() if line][-1] == "data: [DONE]"
        with client.stream("POST", "/v1/completions", json=body(900)) as reply:
            next(reply.iter_lines())
            assert server.stop() < STOP_TIMEOUT_S
    assert server.process.returncode == 0
    assert not directory.exists()
    log = server.log.read_text()
    assert "Ready after" in log
    assert log.rstrip().endswith("Stopped.")
    assert "Traceback" not in log


def commands(server: Server, name: str) -> list[str]:
    """The command lines of the server's processes of that name."""
    found = []
    for child in server.children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if child.name() == name:
                found.append(" ".join(child.cmdline()))
    return found


def component_hosts(server: Server) -> list[psutil.Process]:
    """The processes that host components, as far as they have begun."""
    found = []
    for child in server.children():
        with contextlib.suppress(psutil.Error):  # it has just ended
            if " ".join(child.cmdline()).startswith("ray::ComponentHost"):
                found.append(child)
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "term"])
def test_an_interrupted_start_leaves_nothing(tmp_path: Path, number: int) -> None:
    server = spawn_server(tmp_path / "log")
    while len(hosts := component_hosts(server)) < 3:  # the worker is among them
        assert server.process.poll() is None, server.log.read_text()
        time.sleep(0.1)
    for host in hosts:
        host.suspend()  # so that the start is not over before the signal comes
    assert server.stop(number) < STOP_TIMEOUT_S
    assert server.process.returncode == 130
    assert "Traceback" not in server.log.read_text()
