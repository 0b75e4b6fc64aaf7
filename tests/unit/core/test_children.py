"""Processes that compute for another one end with it, however that one ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[3]
LONG_S = 240.0
"""For what a busy machine may delay."""

POOL = """
import os, sys, time
from farsight.core.children import worker_pool

def work(_):
    print(os.getpid(), flush=True)
    while True:
        time.sleep(1)

if __name__ == "__main__":
    with worker_pool(2) as pool:
        for future in [pool.submit(work, each) for each in range(20)]:
            future.result()
"""

FIT = """
import os, sys, threading, time
from farsight.predictor.learning_process import FitProcess

def work(_):
    print(os.getpid(), flush=True)
    while True:
        time.sleep(1)

if __name__ == "__main__":
    # The thread that starts a fit may end before the fit does.
    thread = threading.Thread(target=lambda: globals().update(fit=FitProcess(work, 0, 0.0, 1e9)))
    thread.start()
    thread.join()
    while True:
        time.sleep(1)
"""

RANK = """
import time
from farsight.engine.parallel.links import LocalRanks
from farsight.engine.parallel.mesh import Mesh

ranks = LocalRanks(Mesh(tensor=2, pipeline=1))
print(ranks.processes[0].pid, flush=True)
while True:
    time.sleep(1)
"""


def start(folder: Path, script: str, num_children: int) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A process and those of its children that compute."""
    file = folder / "parent.py"
    file.write_text(script)
    parent = subprocess.Popen(
        [sys.executable, str(file)], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    return parent, [psutil.Process(int(parent.stdout.readline())) for _ in range(num_children)]


def has_ended(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def wait_ended(processes: list[psutil.Process]) -> None:
    deadline = time.monotonic() + LONG_S
    while not all(map(has_ended, processes)):
        assert time.monotonic() < deadline, processes
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="whether an orphan is a zombie is Linux's to say")
@pytest.mark.parametrize(
    ("script", "num_children", "number", "status"),
    [
        (POOL, 2, signal.SIGTERM, 128 + signal.SIGTERM),
        (POOL, 2, signal.SIGINT, -signal.SIGINT),
        (POOL, 2, signal.SIGKILL, -signal.SIGKILL),
        (FIT, 1, signal.SIGTERM, -signal.SIGTERM),
        (FIT, 1, signal.SIGKILL, -signal.SIGKILL),
        pytest.param(RANK, 1, signal.SIGKILL, -signal.SIGKILL, marks=pytest.mark.torch),
    ],
)
def test_children_end_with_their_parent(
    tmp_path: Path, script: str, num_children: int, number: signal.Signals, status: int
) -> None:
    parent, children = start(tmp_path, script, num_children)
    try:
        parent.send_signal(number)
        assert parent.wait(LONG_S) == status
        wait_ended(children)
    finally:
        parent.kill()
        for child in children:
            if not has_ended(child):
                child.kill()
        parent.communicate()
