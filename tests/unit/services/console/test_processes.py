"""The servers of a user here: real processes with run files, which are listed and ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from farsight.services.cli import app
from farsight.services.console.processes import server_process
from farsight.services.run_file import RunFile, run_files
from tests.command_line import CliRunner

PORTS = (1, 2)
"""No program listens there, so that the servers do not answer."""

SERVER = """
import signal, sys
from farsight.services.run_file import published
with published(int(sys.argv[1]), "secret"):
    print("up", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
"""


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[str]]]:
    """Two, and the run file of a third that was killed."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("FARSIGHT_ADMIN_TOKEN", raising=False)
    words = [sys.executable, "-c", SERVER]
    begun = [subprocess.Popen([*words, str(port)], stdout=subprocess.PIPE, text=True) for port in PORTS]
    for each in begun:
        assert each.stdout is not None and each.stdout.readline() == "up\n"
    (tmp_path / "farsight" / "3.json").write_text(json.dumps({"pid": 2**22 - 1, "admin_token": "", "tls_cert": ""}))
    (tmp_path / "farsight" / "4.json").write_text("{}")
    yield begun
    for each in begun:
        each.kill()
        each.communicate()


def test_servers_are_listed_and_ended(servers: list[subprocess.Popen[str]]) -> None:
    assert [each.port for each in run_files()] == [1, 2, 3]
    listed = json.loads(CliRunner().invoke(app, ["ps", "--json"]).stdout)
    assert [(each["port"], each["pid"], each["models"]) for each in listed] == [
        (port, each.pid, []) for port, each in zip(PORTS, servers, strict=True)
    ]
    assert all(each["memory_bytes"] > 2**20 and each["up_s"] >= 0 for each in listed)
    assert "http://127.0.0.1:2" in CliRunner().invoke(app, ["ps"]).stdout
    several = CliRunner().invoke(app, ["stop"])
    assert several.exit_code == 1 and "PORT: got None, expected the port of a server that you run here (1, 2)" in (
        several.stderr
    )
    assert json.loads(CliRunner().invoke(app, ["stop", "1", "--json"]).stdout) == {"ended": ["serve:1"]}
    assert (servers[0].wait(), servers[1].poll()) == (0, None)
    assert CliRunner().invoke(app, ["stop", "--now"]).stdout == "Ended: serve:2.\n", "the only one that is left"
    assert "No server of yours" in CliRunner().invoke(app, ["ps"]).stdout


def test_another_process_with_the_number_of_a_server_is_none() -> None:
    own = psutil.Process().create_time()
    assert server_process(RunFile(8000, os.getpid(), own + 60, False)) is not None
    assert server_process(RunFile(8000, os.getpid(), own - 60, False)) is None
