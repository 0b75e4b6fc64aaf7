"""A HAProxy that stands still is told from one that is busy."""

from __future__ import annotations

import itertools

from services.proxy.probe import IDLE_PROBES, STOPPED_PROBES, Silence


def test_a_stopped_process_is_stuck_after_two_probes() -> None:
    silence = Silence()
    found = [silence.is_stuck(7, False, lambda _: (True, 1.5)) for _ in range(STOPPED_PROBES)]
    assert found == [False] * (STOPPED_PROBES - 1) + [True]


def test_a_process_that_runs_no_instruction_is_stuck_later() -> None:
    silence = Silence()
    found = [silence.is_stuck(7, False, lambda _: (False, 1.5)) for _ in range(IDLE_PROBES)]
    assert found == [False] * (IDLE_PROBES - 1) + [True]


def test_a_busy_process_is_never_stuck_however_long_it_is_silent() -> None:
    silence = Silence()
    used = itertools.count()
    assert not any(silence.is_stuck(7, False, lambda _: (False, 0.01 * next(used))) for _ in range(1000))


def test_an_answer_or_another_process_begins_the_count_again() -> None:
    silence = Silence()
    for _ in range(10):
        assert not silence.is_stuck(7, False, lambda _: (True, 1.5))
        assert not silence.is_stuck(7, True, lambda _: (True, 1.5))
    for pid in range(10, 20):
        assert not silence.is_stuck(pid, False, lambda _: (True, 1.5))
