"""When another length predictor or replica is wanted, and when one fewer."""

from __future__ import annotations

import dataclasses
import itertools

from farsight.core.config.engine import ModelConfig
from farsight.core.costs import StepCost
from farsight.core.messages.requests import Demand, LoadSnapshot
from farsight.policies.fleet.scaling import (
    FULL_FOR_S,
    FULL_QUEUE,
    IDLE_FOR_S,
    LATE_FOR_S,
    QueueScaler,
    ReplicaScaler,
)

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
    assert scaler.wanted(FULL, FULL_FOR_S) == 1, "the while begins again"
    assert [scaler.wanted([2 * FULL_QUEUE - 1, 0], 10.0 + second) for second in range(9)] == [2] * 9
    assert [scaler.wanted([2 * FULL_QUEUE, 0], 30.0 + second) for second in range(4)] == [2, 2, 2, 3]


def test_one_fewer_after_a_long_idle_time_and_never_below_the_least() -> None:
    scaler = QueueScaler(2, 3)
    assert scaler.wanted([0, 0, 0], 0.0) == 3
    assert scaler.wanted([0, 0, 1], IDLE_FOR_S) == 3, "there was a question"
    assert scaler.wanted([0, 0, 0], IDLE_FOR_S + 1) == 3
    assert scaler.wanted([0, 0, 0], 2 * IDLE_FOR_S + 1) == 2
    times = itertools.accumulate([IDLE_FOR_S] * 4, initial=3 * IDLE_FOR_S)
    assert [scaler.wanted([0, 0], now) for now in times] == [2] * 5


BOUNDS = ModelConfig(min_replicas=1, max_replicas=6, target_queue_delay_s=1.0, scale_down_after_s=60.0)


def seen(num_requests: int, num_replicas: int) -> LoadSnapshot:
    """A replica runs four at once; one of them ends each 125 ms."""
    demand = Demand(num_requests, 0, num_replicas, 100.0 * num_requests, 0.0, 50.0 * num_requests)
    return LoadSnapshot(demand, num_replicas, 4, 10_000, joins=True, cost=StepCost(0.010, 0.0, 0.0, 0.0))


def test_as_many_replicas_at_once_as_the_delay_asks_for() -> None:
    scaler = ReplicaScaler(BOUNDS)
    late = seen(
        40, 1
    )  # 37 of them are before who comes: 4.6 s; with three replicas 29 for 1.2 s, with four 25 for 0.8 s
    assert scaler.wanted(late, 1, 0.0) == 1
    assert scaler.wanted(late, 1, LATE_FOR_S - 0.1) == 1
    assert scaler.wanted(late, 1, LATE_FOR_S) == 4
    assert scaler.wanted(late, 4, LATE_FOR_S + 1) == 4, "they start: that is waited for"
    assert scaler.wanted(seen(40, 4), 4, 100.0) == 4, "0.8 s is within the target"


def test_a_short_burst_adds_nothing_and_no_more_than_the_bound_is_wanted() -> None:
    scaler = ReplicaScaler(BOUNDS)
    assert [scaler.wanted(seen(n, 1), 1, float(at)) for at, n in enumerate((40, 40, 3, 40, 40, 40))] == [1] * 6
    assert scaler.wanted(seen(4000, 1), 1, 6.0) == 6


def test_one_fewer_once_the_rest_would_have_done_for_long_enough() -> None:
    scaler = ReplicaScaler(BOUNDS)
    assert scaler.wanted(seen(4, 3), 3, 0.0) == 3
    assert scaler.wanted(seen(4, 3), 3, 59.9) == 3
    assert scaler.wanted(seen(4, 3), 3, 60.0) == 2
    assert scaler.wanted(seen(4, 2), 2, 61.0) == 2, "the next one has a calm time of its own"
    assert scaler.wanted(seen(4, 2), 2, 121.0) == 1
    assert scaler.wanted(seen(0, 1), 1, 1000.0) == 1, "never fewer than the bound"


def test_the_calm_time_begins_anew_with_every_load_that_the_rest_could_not_have_served() -> None:
    scaler = ReplicaScaler(BOUNDS)
    assert scaler.wanted(seen(4, 2), 2, 0.0) == 2
    assert scaler.wanted(seen(10, 2), 2, 59.0) == 2, "0.2 s with two, but 0.9 s with one: above half of the target"
    assert scaler.wanted(seen(4, 2), 2, 60.0) == 2
    assert scaler.wanted(seen(4, 2), 2, 119.9) == 2
    assert scaler.wanted(seen(4, 2), 2, 120.0) == 1


def test_a_load_that_stays_is_not_answered_up_and_down_in_turn() -> None:
    scaler, count, changes = ReplicaScaler(BOUNDS), 1, 0
    for second in range(1000):
        wanted = scaler.wanted(seen(20, count), count, float(second))
        changes, count = changes + (wanted != count), wanted
    assert (count, changes) == (2, 1)


def test_while_a_replica_is_away_or_the_number_has_just_been_changed_everything_is_waited_for() -> None:
    scaler = ReplicaScaler(BOUNDS)
    assert scaler.wanted(seen(40, 2), 2, 0.0) == 2
    assert scaler.wanted(seen(40, 1), 2, 2.0) == 2, "one has died"
    assert scaler.wanted(seen(40, 2), 2, LATE_FOR_S) == 2, "late again since now"
    assert scaler.wanted(seen(40, 2), 2, 2 * LATE_FOR_S) == 4
    assert scaler.wanted(seen(0, 2), 2, 10.0) == 2
    assert scaler.wanted(seen(0, 5), 5, 69.0) == 5, "five are wanted now: a calm time begins"
    assert scaler.wanted(seen(0, 5), 5, 71.0) == 5
    assert scaler.wanted(seen(0, 5), 5, 129.0) == 4


def test_without_a_prediction_nothing_changes() -> None:
    scaler = ReplicaScaler(BOUNDS)
    blind = dataclasses.replace(seen(500, 2), cost=None)
    assert [scaler.wanted(blind, 2, float(at)) for at in range(0, 200, 10)] == [2] * 20
