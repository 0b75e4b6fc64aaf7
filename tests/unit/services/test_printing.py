"""What a command prints: how far it has come, on a terminal alone; what a server says of its processes; numbers."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from typing import Any

import pytest

from farsight.services.console.status import print_components, print_processes
from farsight.services.progress import StatusLine, progress_bar, status_line
from farsight.services.words import counted

SCRIPT = """
from farsight.services.progress import progress_bar
with progress_bar("rows", {total}) as tell:
    for done in range(1, 4):
        tell(done)
print("done")
"""


def on_a_terminal(script: str) -> tuple[str, str]:
    """What a program prints on standard output, and what it shows on a terminal that is its stderr."""
    master, slave = pty.openpty()
    with os.fdopen(master, "rb", buffering=0) as shown:
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
        command = [sys.executable, "-c", script]
        ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=slave, env=environment, text=True, timeout=300)
        os.close(slave)
        found = b""
        while part := _read(shown.fileno()):
            found += part
    assert ran.returncode == 0, found
    return ran.stdout, re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", found.decode())


def _read(terminal: int) -> bytes:
    """Empty at the end, which Linux reports as an error of a terminal whose writers have gone."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""


@pytest.mark.parametrize(("total", "last"), [(3, "3/3"), (None, "3 ")])
def test_a_terminal_shows_what_is_done(total: int | None, last: str) -> None:
    printed, shown = on_a_terminal(SCRIPT.format(total=total))
    assert printed == "done\n"
    assert "rows" in shown
    assert last in shown


def test_json_has_no_bar() -> None:
    script = SCRIPT.format(total=3).replace("3) as", "3, as_json=True) as").replace("tell(done)", "assert tell is None")
    assert on_a_terminal(script) == ("done\n", "")


def test_one_line_is_rewritten_below_the_others() -> None:
    terminal = io.StringIO()
    line = StatusLine(terminal, lambda: 20)
    line.show("")  # nothing was there to take away
    assert terminal.getvalue() == ""
    line.show("one")
    line.show("a text that is too long to fit")
    with line.above():
        terminal.write("printed\n")
    line.show("")
    with line.above():
        terminal.write("last\n")
    *rewritten, last = terminal.getvalue().split("\r\x1b[K")
    cut = "a text that is t..."
    assert (rewritten, last) == (["", "one", cut, "printed\n", cut], "last\n")


@pytest.mark.parametrize(("term", "rewrites"), [("xterm", True), ("dumb", False)])
def test_a_line_is_rewritten_where_the_terminal_can(term: str, rewrites: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", term)
    terminal, pipe = io.StringIO(), io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    assert (status_line(terminal) is not None) == rewrites
    assert status_line(pipe) is None


def test_a_pipe_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("rows", 3) as tell:
        assert tell is None
    assert capsys.readouterr() == ("", "")


def status_row(name: str, **fields: str) -> dict[str, Any]:
    who = {"name": name, "kind": "ModelWorker", "pid": 7, "node": "here", "state": "ready", "queue": 0}
    rest = {"last_step_age_s": None, "restarts": 2, "url": "", "breaker": "", "degraded": "", "last_end": ""}
    return {**who, **rest, **fields}


def test_what_each_process_uses_is_told_with_what_it_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    before = [{"pid": 7, "name": "ComponentHost", "cpu_s": 1.0, "memory_bytes": 2**20}]
    after = [before[0] | {"cpu_s": 1.5}, {"pid": 8, "name": "raylet", "cpu_s": 9.0, "memory_bytes": 2**22}]
    print_processes(before, after, [status_row("worker-0"), status_row("router")])
    raylet, host, total = [line.split() for line in capsys.readouterr().out.splitlines() if "%" in line]
    assert [word for word in raylet if word[0].isalnum()] == ["raylet", "8", "0.0%", "4"], "it has just begun"
    assert [word for word in host if word[0].isalnum()] == ["ComponentHost", "7", "worker-0,", "router", "25.0%", "1"]
    assert [word for word in total if word[0].isalnum()] == ["all", "25.0%", "5"]


def test_why_a_process_was_replaced_or_is_degraded_is_told_where_one_is(capsys: pytest.CaptureFixture[str]) -> None:
    why = "no answer for 10.0 s, stopped or blocked"
    degraded = status_row("worker-1", degraded="cannot write the log")
    print_components([status_row("worker-0", last_end=why), degraded], [])
    lines = capsys.readouterr().out.splitlines()
    (replaced,) = (line for line in lines if why in line)
    assert "worker-0" in replaced and " 2 " in replaced
    assert [line for line in lines if "cannot write the log" in line and "worker-1" in line]
    assert sum("degraded" in line for line in lines) == 2
    print_components([status_row("worker-0")], [])
    assert "replaced" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (1, "request", "1 request"),
        (0, "request", "0 requests"),
        (1.0, "token", "1 token"),
        (1024, "token", "1,024 tokens"),
        (-1e-13, "token", "0 tokens"),
        (2, "process", "2 processes"),
        (1, "process", "1 process"),
    ],
)
def test_a_number_has_its_noun(number: float, noun: str, text: str) -> None:
    assert counted(number, noun) == text
