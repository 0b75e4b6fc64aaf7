"""Job submission through the real Jobs API of a private Ray cluster with token auth."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TIMEOUT_S = 300.0
"""For anything at all: a busy machine must not fail a test."""

pytestmark = pytest.mark.timeout(3 * TIMEOUT_S)

ROOT = Path(__file__).resolve().parents[3]
Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a cluster that runs one command as a job; none outlives the test."""
    processes: list[subprocess.Popen[str]] = []

    def start(command: str) -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "tests.e2e.batch.batch_cluster", command]
        processes.append(subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return processes[-1]

    yield start
    for process in processes:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=TIMEOUT_S)


def test_log_and_status_of_a_job_come_back(start: Start) -> None:
    command = 'echo "$GREETING"; sleep 1; echo done; exit 7'
    output, errors = start(command).communicate(timeout=TIMEOUT_S)
    lines = output.splitlines()
    assert "good day" in lines, errors
    assert lines[-2:] == ["done", "status 7"]


def test_interrupt_ends_the_job(start: Start) -> None:
    process = start("echo started; trap '' TERM; for i in $(seq 3000); do sleep 0.1; done; echo finished")
    assert process.stdout is not None
    assert "started\n" in iter(process.stdout.readline, ""), process.communicate()
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert output.splitlines()[-1] == "status 130"
    assert "finished" not in output
