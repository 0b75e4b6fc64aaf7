"""Deaths within a server, and bad settings of the command itself."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from farsight.services.launch.launch import EMBEDDED_MODEL
from tests.e2e.server import LONG_S, farsight, kill_all, start_server
from tests.free_ports import free_port


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(farsight(*args), capture_output=True, text=True, timeout=LONG_S)


def test_the_death_of_the_command_ends_every_process(tmp_path: Path) -> None:
    server = start_server(tmp_path / "log")
    children = server.children()
    server.process.kill()
    try:
        server.wait_gone(children)
    finally:
        kill_all(children)


def test_a_busy_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = run("serve", "--port", str(taken.getsockname()[1]))
    assert result.returncode == 1
    assert "--port" in result.stderr
    assert "a port that no other program listens on" in result.stderr


@pytest.mark.parametrize(
    ("flags", "messages"),
    [
        (["--preset", "fcsf"], ["did you mean 'fcfs'"]),
        (["--max-model-len", "100000"], ["--max-model-len: got 100000, expected at most"]),
        (["--predictor", "{strange}"], ["--predictor", "farsight train"]),
        (["--config", "/nonexistent.toml"], ["a readable TOML file"]),
        (["--model", "{strange}"], ["MambaForCausalLM", "LlamaForCausalLM"]),
    ],
    ids=lambda found: found[0] if found[0].startswith("--") else "",
)
def test_what_cannot_work_is_refused_before_anything_starts(
    tmp_path: Path, flags: list[str], messages: list[str]
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    given = [each.format(strange=tmp_path) for each in flags]
    result = run("serve", *given, "--port", str(free_port()))
    assert result.returncode == 1
    assert all(message in result.stderr for message in messages), result.stderr
    assert "Traceback" not in result.stderr and "Farsight is starting" not in result.stdout + result.stderr


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
