"""Runs of pytest that end in every way, and what their tests leave running: nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.free_ports import free_port
from tests.processor_time import over_budget

ROOT = Path(__file__).parents[2]
LONG_S = 120.0

RUN = '''
import os, subprocess, sys, time

def test_it():
    """Leaves a process of a session of its own, whose parent has ended."""
    orphan = "import os, time; os.fork() and os._exit(0); os.setsid(); print(os.getpid(), flush=True); time.sleep(1000)"
    done = subprocess.run([sys.executable, "-c", orphan], stdout=open("left", "w"))
    while not open("left").read().endswith("\\n"):
        time.sleep(0.01)
    open("begun", "w").close()
    {end}
'''


def wait_until(holds: object, otherwise: str) -> None:
    deadline = time.monotonic() + LONG_S
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("end", "is_killed", "flags"),
    [
        ("pass", False, ()),
        ("raise ValueError", False, ()),
        ("time.sleep(1000)", True, ()),
        ("time.sleep(1000)", True, ("-n", "1")),
    ],
    ids=["passes", "fails", "is killed", "is killed beside its processes"],
)
def test_nothing_is_left_running(tmp_path: Path, end: str, is_killed: bool, flags: tuple[str, ...]) -> None:
    (tmp_path / "test_it.py").write_text(RUN.format(end=end))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    words = ["-q", "-p", "tests.processor_time", "-p", "no:cacheprovider", *flags, "test_it.py"]
    run = subprocess.Popen(
        [sys.executable, "-m", "pytest", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
    )
    wait_until((tmp_path / "begun").exists, "the test has not begun")
    left = int((tmp_path / "left").read_text())
    if is_killed:
        assert psutil.pid_exists(left)
        family = psutil.Process(run.pid).children(recursive=True)
        run.send_signal(signal.SIGKILL)
    else:
        family = []
    assert run.wait(LONG_S) == (-signal.SIGKILL if is_killed else int(end != "pass"))
    wait_until(lambda: not psutil.pid_exists(left), "a process of the test lives")
    assert not psutil.wait_procs(family, timeout=LONG_S)[1]


BUDGET = {"total": 100, "large": ["large.py"]}


@pytest.mark.parametrize(
    ("seconds", "slowness", "said"),
    [
        ({"small.py": 19.0, "large.py": 41.0, "collection": 44.0}, 1.0, []),
        ({"small.py": 38.0, "large.py": 82.0, "collection": 88.0}, 2.0, []),
        ({"small.py": 21.0}, 1.0, ["small.py: 21.0 processor seconds, 20 allowed where it is not listed"]),
        ({"collection": 106.0}, 1.0, ["all tests: 106 processor seconds, budget 100 and 5 % above it"]),
    ],
)
def test_what_breaks_the_budget_is_told(seconds: dict[str, float], slowness: float, said: list[str]) -> None:
    assert over_budget(BUDGET, seconds, slowness) == said


ELSEWHERE = "from tests.free_ports import free_port; print(*(free_port() for _ in range(50)))"


def test_nobody_is_given_a_port_of_another() -> None:
    """Neither here nor in another process, though none of them is bound."""
    here = [free_port() for _ in range(50)]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], cwd=root, capture_output=True, text=True, check=True)
    assert len({*here, *map(int, done.stdout.split())}) == 100
