"""Deaths within a server, and bad settings of the command itself."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.common.streams import MAX_TRIES
from services.launch.launch import EMBEDDED_MODEL, EMBEDDED_NAME
from tests.e2e.batch.batch_runs import without_agents
from tests.e2e.server import LONG_S, Server, farsight, kill_all, one_ingress, start_server, wait_until
from tests.free_ports import free_port


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(farsight(*args), capture_output=True, text=True, timeout=LONG_S)


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose processes are killed; in the end it must stop as any other."""
    folder = tmp_path_factory.mktemp("mortal")
    running = start_server(folder / "log", "--dtype", "float32", *one_ingress(folder))
    yield running
    running.stop()
    assert running.process.returncode == 0


# These two deaths under 64 streams are in test_faults.py; here in the placement that the machine's size gives.
@pytest.mark.long
def test_a_dead_worker_is_replaced_and_its_streams_go_on(mortal: Server) -> None:
    body = {"model": EMBEDDED_NAME, "prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    pid = mortal.pid_of("ModelWorker")
    with httpx.stream("POST", f"{mortal.base_url}/v1/completions", json=body, timeout=LONG_S) as reply:
        lines = reply.iter_lines()
        next(lines)
        os.kill(pid, signal.SIGKILL)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert '"completion_tokens":900' in rest[-2].replace(" ", "")
    assert not any('"error"' in line for line in rest)
    mortal.wait_idle()
    assert mortal.pid_of("ModelWorker") != pid


@pytest.mark.long
def test_a_dead_ingress_breaks_only_its_own_streams_and_leaks_nothing(mortal: Server) -> None:
    body = {"model": EMBEDDED_NAME, "prompt": "x", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    for _ in range(MAX_TRIES):
        pid = mortal.pid_of("Ingress")
        with httpx.stream("POST", f"{mortal.base_url}/v1/completions", json=body, timeout=LONG_S) as reply:
            lines = reply.iter_lines()
            next(lines)
            os.kill(pid, signal.SIGKILL)
            rest, is_broken = read_rest(lines)
        wait_until(mortal.answers, "no new ingress replica came up")
        mortal.wait_idle(ingress_too=False)
        if is_broken:
            return
        assert rest[-1] == "data: [DONE]"  # the stream was over before the kill
    raise AssertionError(f"{MAX_TRIES} times the stream was over before the kill")


def read_rest(lines: Iterator[str]) -> tuple[list[str], bool]:
    """What still comes, and whether the connection broke before it was all."""
    rest = []
    try:
        for line in lines:
            rest += [line] if line else []
    except httpx.RemoteProtocolError:
        return rest, True
    return rest, False


def test_the_death_of_the_command_ends_every_component(tmp_path: Path) -> None:
    """Two agents of Ray, which hold nothing of ours, look for their dead head node for a minute before they end."""
    server = start_server(tmp_path / "log")
    children = server.children()
    components = without_agents(children)
    server.process.kill()
    try:
        server.wait_gone(components)
    finally:
        kill_all(children)


def test_a_busy_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = run("serve", "--port", str(taken.getsockname()[1]))
    assert result.returncode == 1
    assert "--port" in result.stderr
    assert "a free address" in result.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--preset", "fcsf"], "did you mean 'fcfs'"),
        (["--dtype", "int3"], "one of auto, float32, bfloat16, float16"),
        (["--port", "99999"], "a port from 1 to 65535"),
        (["--kv-memory", "lots"], "--kv-memory"),
        (["--max-model-len", "100000"], "--max-model-len: got 100000, expected at most"),
        (["--config", "/nonexistent.toml"], "a readable TOML file"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_before_anything_starts(flags: list[str], message: str) -> None:
    port = [] if "--port" in flags else ["--port", str(free_port())]
    result = run("serve", *flags, *port)
    assert result.returncode == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_model_that_is_not_supported_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    result = run("serve", "--model", str(tmp_path), "--port", str(free_port()))
    assert result.returncode == 1
    assert "MambaForCausalLM" in result.stderr
    assert "LlamaForCausalLM" in result.stderr


@pytest.mark.parametrize(
    ("missing", "flags", "message"),
    [
        ("model.safetensors", [], "a directory with model.safetensors"),
        ("tokenizer.json", [], "a model directory with a tokenizer.json"),
        ("", ["--kv-memory", "100B"], "room for at least one block"),
    ],
    ids=["no weights", "no tokenizer", "no room"],
)
def test_a_worker_that_cannot_start_says_why(tmp_path: Path, missing: str, flags: list[str], message: str) -> None:
    model = tmp_path / "model"
    shutil.copytree(EMBEDDED_MODEL, model, ignore=shutil.ignore_patterns(missing) if missing else None)
    result = run("serve", "--model", str(model), "--port", str(free_port()), *flags)
    assert result.returncode == 1
    assert message in result.stderr
    assert result.stderr.splitlines()[-1].startswith("farsight: ")  # before it the components' own lines


def test_an_unknown_key_of_the_file_names_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "farsight.toml"
    path.write_text("[engine]\nkv_memry = '1GiB'\n")
    result = run("serve", "--config", str(path))
    assert result.returncode == 1
    assert "engine.kv_memry" in result.stderr
    assert "did you mean 'kv_memory'" in result.stderr


def test_status_without_a_server_says_so() -> None:
    result = run("status", "--port", str(free_port()))
    assert result.returncode == 1
    assert "no server answers" in result.stderr
