"""When another length predictor is wanted, and when one fewer."""

from __future__ import annotations

import itertools

from actors.autoscaling import FULL_FOR_S, FULL_QUEUE, IDLE_FOR_S, QueueScaler

FULL = [FULL_QUEUE]


def test_one_more_while_all_have_had_their_hands_full_for_a_while() -> None:
    scaler = QueueScaler(1, 3)
    assert scaler.wanted(FULL, 0.0) == 1
    assert scaler.wanted(FULL, FULL_FOR_S - 0.1) == 1
    assert scaler.wanted(FULL, FULL_FOR_S) == 2
    assert scaler.wanted(FULL * 2, FULL_FOR_S + 1) == 2, "the new one has a while of its own"
    assert scaler.wanted(FULL * 2, 2 * FULL_FOR_S + 1) == 3
    assert scaler.wanted(FULL * 3, 5 * FULL_FOR_S) == 3
    assert scaler.wanted(FULL * 3, 9 * FULL_FOR_S) == 3, "never more than the most"


def test_a_pause_or_an_idle_neighbour_means_that_those_there_are_do() -> None:
    scaler = QueueScaler(1, 3)
    scaler.wanted(FULL, 0.0)
    assert scaler.wanted([FULL_QUEUE - 1], 2.0) == 1
    assert scaler.wanted(FULL, FULL_FOR_S) == 1, "the while begins anew"
    assert [scaler.wanted([2 * FULL_QUEUE - 1, 0], 10.0 + second) for second in range(9)] == [2] * 9
    assert [scaler.wanted([2 * FULL_QUEUE, 0], 30.0 + second) for second in range(4)] == [2, 2, 2, 3]


def test_one_fewer_after_a_long_idle_time_and_never_below_the_least() -> None:
    scaler = QueueScaler(2, 3)
    assert scaler.wanted([0, 0, 0], 0.0) == 3
    assert scaler.wanted([0, 0, 1], IDLE_FOR_S) == 3, "somebody asked"
    assert scaler.wanted([0, 0, 0], IDLE_FOR_S + 1) == 3
    assert scaler.wanted([0, 0, 0], 2 * IDLE_FOR_S + 1) == 2
    times = itertools.accumulate([IDLE_FOR_S] * 4, initial=3 * IDLE_FOR_S)
    assert [scaler.wanted([0, 0], now) for now in times] == [2] * 5
