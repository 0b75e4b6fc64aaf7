"""The bar of a command: on a terminal it counts and goes away, in a pipe there is none."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import pytest

from services.progress import progress_bar

SCRIPT = """
from services.progress import progress_bar
with progress_bar("rows", {total}) as tell:
    for done in range(1, 4):
        tell(done)
print("done")
"""


def on_a_terminal(script: str, *, prints_there: bool = False) -> tuple[str, str]:
    """What a program prints on standard output, and what it shows on a terminal that is its stderr.

    Args:
        prints_there: Whether that terminal is its standard output as well.
    """
    master, slave = pty.openpty()
    with os.fdopen(master, "rb", buffering=0) as shown:
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
        command = [sys.executable, "-c", script]
        stdout = slave if prints_there else subprocess.PIPE
        ran = subprocess.run(command, stdout=stdout, stderr=slave, env=environment, text=True, timeout=300)
        os.close(slave)
        found = b""
        while part := _read(shown.fileno()):
            found += part
    assert ran.returncode == 0, found
    return ran.stdout or "", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", found.decode())


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


LOADS = """
from services.launch.starting import LoadBar
bar = LoadBar(lambda: "% of 13 GiB loaded")
for share in (None, {shares}):
    bar.show(share)
    print("a stage ended")
bar.close()
"""


def test_weights_that_are_read_have_a_bar_between_the_lines_of_stages() -> None:
    _, shown = on_a_terminal(LOADS.format(shares="0.1, 0.4, 1.0"), prints_there=True)
    assert "% of 13 GiB loaded" in shown and "40/100" in shown
    assert shown.count("a stage ended") == 4
    assert "%" not in on_a_terminal(LOADS.format(shares="1.0"), prints_there=True)[1]  # it was read at once
    assert on_a_terminal(LOADS.format(shares="0.4")) == ("a stage ended\n" * 2, "")  # the lines go to a pipe


def test_a_pipe_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("rows", 3) as tell:
        assert tell is None
    assert capsys.readouterr() == ("", "")
