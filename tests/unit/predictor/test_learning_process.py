"""A fit in a process of its own: what comes back, and that nothing it does harms who asked for it."""

from __future__ import annotations

import io
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any

import numpy as np
import pytest

from farsight.predictor.learning import HELD_BACK_EVERY, MIN_HELD_BACK, PERIOD_S, ContinuousLearning, PredictionOutcome
from farsight.predictor.learning_process import STEPS_BACK_S, FitEnd, FitProcess

Numbers = list[float]


def fit_mean(examples: Numbers) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, mean=np.array([np.mean(examples)]))
    return buffer.getvalue()


def tell_about_itself(_: int) -> bytes:
    steps_back = os.sched_getscheduler(0) == os.SCHED_IDLE if sys.platform == "linux" else os.nice(0) == 19
    return f"{os.getpid()} {steps_back:d}".encode()


def send_back(data: bytes) -> bytes:
    return data


def fail(_: int) -> bytes:
    raise ValueError("no two examples alike")


def leave(status: int) -> bytes:
    os._exit(status)


def sleep(seconds: float) -> bytes:
    time.sleep(seconds)
    return b"awake"


def kill_itself(_: int) -> bytes:
    os.kill(os.getpid(), signal.SIGKILL)
    return b""


@contextmanager
def fitting(fit: Callable[[Any], bytes], argument: Any, timeout_s: float = 100.0) -> Iterator[FitProcess]:
    process = FitProcess(fit, argument, 0.0, timeout_s)
    try:
        yield process
    finally:
        process.stop()


def wait(process: FitProcess, now: float = 1.0) -> FitEnd:
    deadline = time.monotonic() + 120
    while (end := process.poll(now)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return end


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_the_child_is_another_process_that_steps_back_and_leaves_nothing() -> None:
    with fitting(tell_about_itself, 0) as process:
        end = wait(process)
        assert end.data is not None and end.error == ""
        pid, steps_back = map(int, end.data.split())
        assert pid != os.getpid() and steps_back
        assert process.poll(1e9) is end, "asked again it says the same"
    assert is_gone(pid)


def test_what_is_larger_than_any_pipe_comes_and_goes_whole() -> None:
    much = bytes(range(256)) * (20 * 2**10)
    with fitting(send_back, much) as process:
        assert wait(process).data == much


@pytest.mark.parametrize(
    ("fit", "argument", "error"),
    [
        (fail, 0, "the fit failed: ValueError: no two examples alike"),
        (leave, 3, "the fit failed: status 3"),
        (kill_itself, 0, "the fit was killed by SIGKILL"),
    ],
)
def test_whatever_goes_wrong_is_reported(fit: Callable[[int], bytes], argument: int, error: str) -> None:
    with fitting(fit, argument) as process:
        assert wait(process) == FitEnd(None, error)


def test_a_fit_that_takes_too_long_is_killed() -> None:
    with fitting(sleep, 1000.0, timeout_s=60.0) as process:
        pid = process.pid
        assert pid is not None and process.poll(59.9) is None
        assert process.poll(60.0) == FitEnd(None, "the fit took longer than 60 s")
        assert is_gone(pid)
    process = FitProcess(sleep, 1000.0, 0.0, 60.0)
    pid = process.pid
    assert pid is not None
    process.stop()
    process.stop()
    assert is_gone(pid) and process.poll(1.0) == FitEnd(None, "the fit was stopped"), "it is wanted no more"


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root takes the lowest priority back")
def test_a_fit_that_gets_no_time_has_the_priority_of_others_in_the_end() -> None:
    with fitting(sleep, 1000.0) as process:
        assert process.pid is not None
        deadline = time.monotonic() + 120
        while os.sched_getscheduler(process.pid) != os.SCHED_IDLE and time.monotonic() < deadline:
            time.sleep(0.01)
        assert process.poll(STEPS_BACK_S - 1) is None
        assert os.sched_getscheduler(process.pid) == os.SCHED_IDLE
        assert process.poll(STEPS_BACK_S) is None
        assert os.sched_getscheduler(process.pid) == os.SCHED_OTHER


def test_what_cannot_be_sent_to_a_child_fails_at_once_and_leaves_no_file_open() -> None:
    resource_tracker.ensure_running()  # opens a file of its own with the first process of a session
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(AttributeError):
        FitProcess(lambda _: b"", 0, 0.0, 60.0)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_killed_in_the_middle_the_current_version_stays_and_the_next_fit_is_right() -> None:
    learning: ContinuousLearning[float, float] = ContinuousLearning(
        lambda model, examples: abs(model - sum(examples) / len(examples)), 10.0
    )
    learning.begin(0.0)
    learning.observe(PredictionOutcome(100.0, 10.0, 100.0) for _ in range(MIN_HELD_BACK * HELD_BACK_EVERY))
    examples = learning.begin(PERIOD_S)
    assert examples is not None
    with fitting(sleep, 1000.0) as process:
        assert process.poll(0.0) is None and process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        assert wait(process).error == "the fit was killed by SIGKILL"
    learning.give_up()
    assert (learning.current, learning.version) == (10.0, 1)
    again = learning.begin(2 * PERIOD_S)
    assert again == examples
    with fitting(fit_mean, again) as process:
        end = wait(process)
    assert end.data is not None
    with np.load(io.BytesIO(end.data), allow_pickle=False) as arrays:
        assert learning.judge(float(arrays["mean"][0])).accepted
    assert (learning.current, learning.version) == (100.0, 2)
