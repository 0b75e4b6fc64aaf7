"""The page "Add a policy", executed as it is written: the package installs, its test passes, it serves."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from farsight.services.launch.launch import EMBEDDED_NAME
from tests.e2e.server import LONG_S, start_server

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "policies" / "add_a_policy.md"


def write_files(page: str, folder: Path) -> None:
    """Every code block of the page that names a file."""
    for name, text in re.findall(r"```\w+ file=(\S+)\n(.*?)```", page, flags=re.DOTALL):
        (folder / name).write_text(text, encoding="utf-8")


def commands(page: str) -> list[list[str]]:
    """The lines of the page's last shell block."""
    return [shlex.split(line) for line in re.findall(r"```sh\n(.*?)```", page, flags=re.DOTALL)[-1].splitlines()]


@pytest.mark.timeout(1200)
def test_the_page_leads_to_a_served_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = PAGE.read_text(encoding="utf-8")
    package, site = tmp_path / "package", tmp_path / "site"
    package.mkdir()
    write_files(page, package)
    pip, pytest_command, simulate, serve = commands(page)
    assert pip == ["pip", "install", "."] and serve == ["farsight", "serve", "--preset", "mine"]

    def run(*words: str) -> str:
        done = subprocess.run(words, cwd=package, capture_output=True, text=True, timeout=LONG_S)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    # Beside this environment, not into it: the tests that run after this one must not find the preset.
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), ".")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), str(ROOT)]))
    assert "2 passed" in run(sys.executable, *pytest_command[1:], "-p", "no:cacheprovider")
    summary = json.loads(run(sys.executable, "-m", "farsight.services.cli", *simulate[1:], "--json"))
    assert "200" in json.dumps(summary)

    server = start_server(tmp_path / "log", *serve[2:], "--device", "emulated:a100-7b")
    try:
        body = {"model": EMBEDDED_NAME, "prompt": "hello", "max_tokens": 3}
        reply = httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=LONG_S)
        assert reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] == 3, reply.text
    finally:
        server.stop()
