"""What is read of real processes, and which of them are ended."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from actors.pulse import clock_of, is_alive, kill, own_life, read_clock
from core.messages.status import ProcessLife, ThreadClock

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")

TURNS = "import time\nprint('on', flush=True)\nwhile True: time.sleep(0.001)"
"""As an event loop that turns by itself."""


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", TURNS], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "on\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def life_of(process: subprocess.Popen[str]) -> ProcessLife:
    with open(f"/proc/{process.pid}/stat") as file:
        began = int(file.read().rpartition(")")[2].split()[19])
    return ProcessLife("node", process.pid, began, process.pid)


def wait_for_state(process: subprocess.Popen[str], state: str) -> None:
    while psutil.Process(process.pid).status() != state:
        pass  # a signal is on its way


@pytest.mark.parametrize(("state", "runnable"), [("R", True), ("D", True), ("S", False), ("T", False)])
def test_a_thread_that_waits_for_a_processor_or_the_disk_does_not_stand_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, runnable: bool
) -> None:
    thread = tmp_path / "7" / "task" / "8"
    thread.mkdir(parents=True)
    (thread / "schedstat").write_text("1500000000 500000000 3\n")
    (thread / "stat").write_text(f"8 (of (any) name) {state} 1 7 7\n")
    monkeypatch.setattr("actors.pulse._PROC", tmp_path)
    assert read_clock(7, 8) == ThreadClock(2.0, runnable)


def test_the_clock_of_a_thread_that_turns_moves_and_that_of_a_stopped_one_does_not(
    child: subprocess.Popen[str],
) -> None:
    life = life_of(child)
    first = clock_of(life)
    assert first is not None
    while (moved := clock_of(life)) is None or moved.effort_s == first.effort_s:
        pass  # the limit of pytest ends it
    child.send_signal(signal.SIGSTOP)
    wait_for_state(child, psutil.STATUS_STOPPED)
    stopped = clock_of(life)
    assert stopped is not None and not stopped.runnable
    for _ in range(100):
        assert clock_of(life) == stopped


def test_a_stopped_process_is_ended(child: subprocess.Popen[str]) -> None:
    child.send_signal(signal.SIGSTOP)
    kill(life_of(child))
    assert child.wait() == -signal.SIGKILL
    assert clock_of(life_of_ended(child)) is None
    kill(life_of_ended(child))  # nothing is there


def life_of_ended(process: subprocess.Popen[str]) -> ProcessLife:
    return ProcessLife("node", process.pid, 1, process.pid)


def test_a_later_process_with_the_same_number_is_left_alone(child: subprocess.Popen[str]) -> None:
    life = life_of(child)
    earlier = dataclasses.replace(life, began=life.began - 1)
    unknown = dataclasses.replace(life, began=0)
    for other in (earlier, unknown):
        kill(other)
        assert not is_alive(other) and clock_of(other) is None
    assert child.poll() is None and is_alive(life)


def test_of_oneself() -> None:
    life = own_life("node")
    assert (life.node_id, life.pid, life.thread_id) == ("node", os.getpid(), threading.get_native_id())
    clock = clock_of(life)
    assert clock is not None and clock.runnable and clock.effort_s > 0
    assert read_clock(os.getpid(), 2**22 + 1) is None
