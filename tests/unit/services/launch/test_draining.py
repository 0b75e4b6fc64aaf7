"""How long the launcher waits for requests to end, and what signals do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from core.messages.drains import DrainProgress, DrainService
from services.launch import draining
from services.launch.daemons import first_dead
from services.launch.draining import drain
from services.launch.signals import StopSignal


@pytest.fixture
def stop(monkeypatch: pytest.MonkeyPatch) -> Iterator[StopSignal]:
    monkeypatch.setattr(draining, "LAST_BYTES_S", 0.0)
    monkeypatch.setattr(draining, "LAST_ERRORS_S", 0.1)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    made = StopSignal()
    made.running()
    yield made
    for number, handler in before.items():
        signal.signal(number, handler)


def test_it_ends_when_no_request_is_open(stop: StopSignal) -> None:
    said: list[str] = []
    answers = [None, DrainProgress(2, False), DrainProgress(0, True)]
    orders: list[DrainService] = []

    def order(asked: DrainService) -> DrainProgress | None:
        orders.append(asked)
        return answers.pop(0)

    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.received and not stop.at_once
    drain(order, stop, 1000.0, 2, said.append)
    assert not answers and [each.num_ingress for each in orders] == [2, 2, 2]
    assert said[0].startswith("Draining: new requests are refused, open ones have 1000 s")
    assert said[1].startswith("Drained after ")


@pytest.mark.parametrize(
    ("answer", "words"), [(None, "what is open is not known"), (DrainProgress(7, False), "open requests: 7")]
)
def test_it_ends_when_the_time_is_over(stop: StopSignal, answer: DrainProgress | None, words: str) -> None:
    said: list[str] = []
    drain(lambda order: answer, stop, 0.0, 1, said.append)
    assert said[-1].startswith("Not drained after ") and words in said[-1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_it_at_once(stop: StopSignal, number: int) -> None:
    said: list[str] = []
    os.kill(os.getpid(), signal.SIGTERM)

    def order(asked: DrainService) -> DrainProgress:
        os.kill(os.getpid(), number)
        return DrainProgress(7, False)

    drain(order, stop, 1000.0, 1, said.append)
    assert said[-1] == "Not drained: a second signal came; open requests: 7."


def test_ctrl_c_alone_gives_no_time(stop: StopSignal) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    assert stop.received and stop.at_once


def test_a_daemon_that_has_ended_is_seen_before_and_after_it_is_reaped() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        processes = [psutil.Process(), psutil.Process(child.pid)]
        assert first_dead(processes) is None
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is not reaped
        assert first_dead(processes) is processes[1]
        child.wait()
        assert first_dead(processes) is processes[1]
