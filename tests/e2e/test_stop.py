"""Ctrl-C: everything is gone in the time that is promised, the server's files with it."""

from __future__ import annotations

import json
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from farsight.services.launch.launch import EMBEDDED_NAME
from farsight.services.run_file import run_directory
from tests.e2e.batch.batch_runs import command_of, hosts_among
from tests.e2e.server import LONG_S, Server, name_of, spawn_server, start_server, wait_until
from tests.e2e.test_hygiene import check_listeners, environment


def body(num_tokens: int) -> dict[str, object]:
    return {"model": EMBEDDED_NAME, "prompt": "x", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}


def haproxy_words(server: Server) -> list[str]:
    """Words in the command lines of its proxies."""
    return [word for child in server.children() if name_of(child) == "haproxy" for word in command_of(child)]


@pytest.mark.parametrize(("placement", "proxy"), [("fused", "haproxy"), ("split", "serve")])
def test_ctrl_c_under_load_stops_everything_in_time(tmp_path: Path, placement: str, proxy: str) -> None:
    server = start_server(tmp_path / "log", "--placement", placement, "--proxy", proxy)
    directory = Path(environment(server)["RAY_TMPDIR"])
    assert directory.stat().st_mode & 0o077 == 0
    if proxy == "haproxy":
        check_listeners(server)
        ours = f"no haproxy of {directory}"  # Ray may just be replacing it by one that knows more
        wait_until(lambda: any(str(directory) in word for word in haproxy_words(server)), ours)
    with httpx.Client(base_url=server.base_url, timeout=LONG_S) as client:
        with client.stream("POST", "/v1/completions", json=body(8)) as reply:
            assert [line for line in reply.iter_lines() if line][-1] == "data: [DONE]"
        with client.stream("POST", "/v1/completions", json=body(900)) as reply:
            next(reply.iter_lines())
            server.stop()
    assert server.process.returncode == 0
    assert not directory.exists()
    log = server.log.read_text()
    assert "Ready after" in log
    assert log.rstrip().endswith("Stopped.")
    assert "Traceback" not in log


SLOW = "emulated:a100-7b"
"""A device on which an answer takes as many seconds as it has tokens, divided by some 100."""


def first_refused(client: httpx.Client) -> httpx.Response:
    """The first 503 of a server that drains; its ingress replicas hear of it one after the other."""
    answers: list[httpx.Response] = []

    def is_refused() -> bool:
        answers.append(client.post("/v1/completions", json=body(8)))
        return answers[-1].status_code == 503

    wait_until(is_refused, "new requests are served though it drains")
    assert {answer.status_code for answer in answers[:-1]} <= {200}
    return answers[-1]


def test_term_refuses_new_requests_lets_open_ones_end_and_tells_the_rest(tmp_path: Path) -> None:
    """One stream ends within the time to drain; the other one would take longer, and gets a terminal error event."""
    server = start_server(tmp_path / "log", "--device", SLOW, "--drain-s", "20", "--max-model-len", "100000")
    directory = Path(environment(server)["RAY_TMPDIR"])
    children = server.children()
    with httpx.Client(base_url=server.base_url, timeout=LONG_S) as client, ExitStack() as stack:
        streams = [
            stack.enter_context(client.stream("POST", "/v1/completions", json=body(num_tokens))).iter_lines()
            for num_tokens in (100, 90_000)
        ]
        for lines in streams:
            next(lines)
        assert client.get("/health/ready").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: client.get("/health/ready").status_code == 503, "it is ready though it drains")
        late = first_refused(client)
        assert late.json()["error"]["code"] == "draining"
        assert int(late.headers["Retry-After"]) >= 1
        whole, cut = ([line for line in lines if line] for lines in streams)
    assert whole[-1] == cut[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in whole[-2].replace(" ", "")
    error = json.loads(cut[-2].removeprefix("data: "))["error"]
    assert error["type"] == "server_error" and "the server is stopping" in error["message"]
    assert not any('"error"' in line for line in (*whole, *cut[:-2]))
    server.wait_gone(children)
    assert server.process.returncode == 0
    assert not directory.exists()
    assert "Draining" in server.log.read_text()


@pytest.mark.parametrize("daemon", ["raylet", "gcs_server"])
def test_the_death_of_a_daemon_of_ray_ends_everything_with_a_message(tmp_path: Path, daemon: str) -> None:
    """Nothing serves on without a Supervisor that could replace what dies."""
    server = start_server(tmp_path / "log")
    directory = Path(environment(server)["RAY_TMPDIR"])
    children = server.children()
    (victim,) = (child for child in children if name_of(child) == daemon)
    victim.kill()
    server.wait_gone(children)
    assert server.process.returncode == 1
    assert not directory.exists()
    assert not (run_directory() / f"{server.port}.json").exists()
    what, todo = [line for line in server.log.read_text().splitlines() if line.startswith("farsight: ")]
    assert what.startswith("farsight: the ") and f"(pid {victim.pid}), has died" in what
    assert todo.startswith("farsight: What to do: ")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "term"])
def test_an_interrupted_start_leaves_nothing(tmp_path: Path, number: int) -> None:
    server = spawn_server(tmp_path / "log")
    while len(hosts := hosts_among(server.children())) < 2:  # the worker's, and that of all others
        assert server.process.poll() is None, server.log.read_text()
        time.sleep(0.1)
    for host in hosts:
        host.suspend()  # so that the start is not over before the signal comes
    server.stop(number)
    assert server.process.returncode == 130
    assert "Traceback" not in server.log.read_text()
