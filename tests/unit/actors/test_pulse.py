"""What a process reports of itself, and how its watcher judges it."""

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

from farsight.actors.pulse import PATIENCE, START_S, HostJudge, clock_of, is_alive, kill, own_life, read_clock
from farsight.actors.worker.step_loop import FIRST_STEPS_S, MOST_TIMES, StepBounds
from farsight.core.messages.status import ProcessLife, Pulse, ThreadClock, Work
from farsight.core.messages.step_times import StepSample

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")

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
@on_linux
def test_a_thread_that_waits_for_a_processor_or_the_disk_does_not_stand_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, runnable: bool
) -> None:
    thread = tmp_path / "7" / "task" / "8"
    thread.mkdir(parents=True)
    (thread / "schedstat").write_text("1500000000 500000000 3\n")
    (thread / "stat").write_text(f"8 (of (any) name) {state} 1 7 7\n")
    monkeypatch.setattr("farsight.actors.pulse._PROC", tmp_path)
    assert read_clock(7, 8) == ThreadClock(2.0, runnable)


@on_linux
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


@on_linux
def test_a_stopped_process_is_ended(child: subprocess.Popen[str]) -> None:
    child.send_signal(signal.SIGSTOP)
    kill(life_of(child))
    assert child.wait() == -signal.SIGKILL
    assert clock_of(life_of_ended(child)) is None
    kill(life_of_ended(child))  # nothing is there


def life_of_ended(process: subprocess.Popen[str]) -> ProcessLife:
    return ProcessLife("node", process.pid, 1, process.pid)


@on_linux
def test_a_later_process_with_the_same_number_is_left_alone(child: subprocess.Popen[str]) -> None:
    life = life_of(child)
    earlier = dataclasses.replace(life, began=life.began - 1)
    unknown = dataclasses.replace(life, began=0)
    for other in (earlier, unknown):
        kill(other)
        assert not is_alive(other) and clock_of(other) is None
    assert child.poll() is None and is_alive(life)


@on_linux
def test_of_oneself() -> None:
    life = own_life("node")
    assert (life.node_id, life.pid, life.thread_id) == ("node", os.getpid(), threading.get_native_id())
    clock = clock_of(life)
    assert clock is not None and clock.runnable and clock.effort_s > 0
    assert read_clock(os.getpid(), 2**22 + 1) is None


SILENCE_S = 10.0
PERIOD_S = 1.0
LIFE = ProcessLife("node", 1, 2, 3)
STILL = ThreadClock(5.0, runnable=False)


def pulse(*work: Work) -> Pulse:
    return Pulse(LIFE, work)


class Watcher:
    """Looks every second, unless it is late itself."""

    def __init__(self, *, heard: bool = True) -> None:
        self.now = 1000.0
        self._judge = HostJudge(SILENCE_S, PERIOD_S)
        if heard:
            assert self.look(pulse()) == ""

    def look(self, pulse: Pulse | None = None, clock: ThreadClock | None = STILL, late_s: float = 0.0) -> str:
        self.now += PERIOD_S + late_s
        return self._judge.look(self.now, pulse, clock)

    def looks(self, number: int, pulse: Pulse | None = None, clock: ThreadClock | None = STILL) -> list[str]:
        """What each of them says."""
        return [self.look(pulse, clock) for _ in range(number)]


def test_a_process_that_stands_still_is_hung_when_it_owes_an_answer_for_so_long() -> None:
    watcher = Watcher()
    watcher.look()  # the first reading of its clock has nothing to be compared with
    assert watcher.looks(9) == [""] * 9
    assert watcher.look() == "no answer for 11.0 s, stopped or blocked"


def test_one_that_answers_is_never_hung_however_still_it_stands() -> None:
    assert set(Watcher().looks(10_000, pulse())) == {""}


def test_an_answer_in_between_begins_the_time_again() -> None:
    watcher = Watcher()
    for _ in range(100):
        assert watcher.looks(9) == [""] * 9
        assert watcher.look(pulse()) == ""


@pytest.mark.parametrize("runnable", [False, True])
def test_a_process_on_a_machine_with_fifty_others_has_ten_times_as_long(runnable: bool) -> None:
    """It is given a processor now and then, or waits for one: that it answers late is not its fault."""
    watcher = Watcher()
    for second in range(int(PATIENCE * SILENCE_S) - 1):
        moved = 0.0 if runnable else 0.001 * (second // 5)  # 1 ms every five seconds
        assert watcher.look(clock=ThreadClock(5.0 + moved, runnable)) == "", second
    assert watcher.look(clock=ThreadClock(9.0, runnable)) == "no answer for 100.0 s"


def test_one_that_has_moved_stands_still_only_from_then_on() -> None:
    watcher = Watcher()
    watcher.looks(9)
    assert watcher.look(clock=ThreadClock(5.1, runnable=False)) == ""
    assert watcher.looks(9, clock=ThreadClock(5.1, runnable=False)) == [""] * 9
    assert "stopped or blocked" in watcher.look(clock=ThreadClock(5.1, runnable=False))


def test_of_one_on_another_node_nothing_is_known_and_it_has_ten_times_as_long() -> None:
    watcher = Watcher()
    assert set(watcher.looks(99, clock=None)) == {""}
    assert watcher.look(clock=None) == "no answer for 100.0 s"


def test_by_how_much_the_watcher_is_late_is_not_held_against_the_process() -> None:
    """A whole machine that was suspended, or too busy to watch: the answers wait where the watcher has yet to look."""
    watcher = Watcher()
    watcher.look()
    assert [watcher.look(late_s=600.0) for _ in range(4)] == [""] * 4, "each counts as two seconds"
    assert watcher.look(pulse(), late_s=600.0) == ""
    watcher.look()
    assert [watcher.look(late_s=600.0) for _ in range(4)] == [""] * 4
    assert "stopped" in watcher.look(late_s=600.0)


def test_one_that_has_never_been_heard_of_may_take_long_to_start() -> None:
    watcher = Watcher(heard=False)
    assert set(watcher.looks(int(START_S), clock=None)) == {""}  # the first look begins
    assert watcher.look(clock=None) == f"no answer for {START_S:.1f} s"


def test_one_that_said_it_is_starting_stands_still_for_a_tenth_of_that() -> None:
    """It loads a library, say, and its event loop waits for the system's loader."""
    watcher = Watcher()
    watcher.look(Pulse(LIFE, (), starting=True))
    still_s = int(START_S / PATIENCE)
    assert set(watcher.looks(still_s)) == {""}  # the first reading of its clock has nothing to be compared with
    assert "stopped or blocked" in watcher.look()
    assert watcher.look(pulse()) == ""
    assert "stopped or blocked" in watcher.looks(12)[-1]


def test_one_that_answered_an_earlier_watcher_has_only_the_usual_time() -> None:
    watcher = Watcher(heard=False)
    assert watcher.looks(10) == [""] * 10
    assert "stopped or blocked" in watcher.look()


def step(count: int, clock: ThreadClock | None = STILL, bound_s: float = 30.0, name: str = "worker-0") -> Pulse:
    return pulse(Work(name, count, bound_s, clock))


def test_work_that_stands_still_for_its_bound_is_hung_though_the_process_answers() -> None:
    watcher = Watcher()
    assert watcher.looks(30, step(7)) == [""] * 30
    assert watcher.look(step(7)) == "worker-0: work 7 has not ended for 30.0 s, blocked"


def test_work_whose_thread_computes_has_ten_times_its_bound() -> None:
    watcher = Watcher()
    for second in range(300):
        assert watcher.look(step(7, ThreadClock(float(second), runnable=False))) == ""
    assert watcher.look(step(7, ThreadClock(1e6, runnable=False))) == (
        "worker-0: work 7 has not ended for 300.0 s, computing or waiting for a processor"
    )


def test_work_of_which_no_thread_is_known_has_ten_times_its_bound() -> None:
    watcher = Watcher()
    assert set(watcher.looks(300, step(7, None))) == {""}
    assert "has not ended for 300.0 s" in watcher.look(step(7, None))


def test_progress_and_rest_begin_the_time_again() -> None:
    watcher = Watcher()
    for count in range(100):
        assert watcher.looks(29, step(count)) == [""] * 29
    assert watcher.looks(29, step(100)) == [""] * 29
    assert watcher.look(pulse()) == ""
    assert watcher.looks(29, step(100)) == [""] * 29, "another life of the component, that counts from the beginning"


def test_components_of_one_process_are_judged_each_by_itself() -> None:
    watcher = Watcher()
    for count in range(30):
        both = Pulse(LIFE, (Work("worker-1", 3, 30.0, STILL), Work("worker-2", count, 30.0, STILL)))
        assert watcher.look(both) == ""
    assert watcher.look(step(3, name="worker-1")).startswith("worker-1: work 3 ")


def sample(decode_seqs: int, duration_s: float) -> StepSample:
    return StepSample(0, decode_seqs, 100 * decode_seqs, duration_s)


def test_the_bound_of_a_step_is_twenty_times_its_price_and_a_fixed_time() -> None:
    bounds = StepBounds(stall_s=60.0)
    assert bounds.bound_s(sample(4, 0.0)) == FIRST_STEPS_S, "kernels are compiled"
    assert bounds.bound_s(None) == 60.0
    for index in range(64):
        bounds.add(sample(1 + index % 4, 0.5 * (1 + index % 4)))
    assert bounds.bound_s(sample(2, 0.0)) == pytest.approx(60.0 + MOST_TIMES * 1.0, rel=0.02)
    assert bounds.bound_s(sample(8, 0.0)) == pytest.approx(60.0 + MOST_TIMES * 4.0, rel=0.02)
