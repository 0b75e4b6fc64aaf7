"""Advice on presets and replicas: what is recommended follows from what was measured, and real runs give it."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from farsight.core.config.scheduling import DEFAULT_PRESET
from farsight.core.errors import InvalidValueError
from farsight.simulator.advice import (
    METRICS,
    Measured,
    Setup,
    advise,
    complete,
    cut_windows,
    in_order,
    run_setup,
    setups,
    to_dict,
)
from farsight.simulator.compare import interval
from farsight.simulator.experiment import Experiment, make_arrivals


def measured(preset: str, replicas: int, good: list[float], jct: list[float]) -> Measured:
    rows: list[dict[str, float | None]] = []
    for share, seconds in zip(good, jct, strict=True):
        rows.append({**dict.fromkeys(METRICS, 1.0), "goodput_share": share, "jct_s_mean": seconds})
    return Measured(Setup(replicas, preset), tuple(rows))


def test_fewest_replicas_that_keep_the_target_and_among_them_the_quickest() -> None:
    rows = [
        measured("fcfs", 1, [0.5, 0.6, 0.4], [9.0, 9.5, 9.2]),
        measured("farsight", 1, [0.9, 0.9, 0.9], [6.0, 6.5, 6.2]),
        measured("fcfs", 2, [1.0, 0.99, 1.0], [3.0, 3.1, 3.2]),
        measured("farsight", 2, [1.0, 1.0, 1.0], [2.0, 2.1, 2.2]),
        measured("fcfs", 3, [1.0, 1.0, 1.0], [1.0, 1.1, 1.2]),
    ]
    advice = advise(rows, 0.99)
    assert advice.best.setup == Setup(2, "farsight")
    assert advice.holds
    assert advice.rivals == ()
    assert advice.reason == (
        "On 2 replicas farsight keeps the targets for 100.0 % of the requests, and on fewer no preset keeps them for "
        "99 %; its mean JCT is 2.1 s, that of fcfs 3.1 s."
    )


def test_default_preset_where_the_windows_do_not_tell_it_apart() -> None:
    default, other = ([2.0, 3.0, 2.5], [2.1, 2.8, 2.5])
    rows = [measured(DEFAULT_PRESET, 1, [1.0] * 3, default), measured("past-future", 1, [1.0] * 3, other)]
    advice = advise(rows, 0.9)
    assert advice.best.setup.preset == DEFAULT_PRESET
    assert [each.setup.preset for each in advice.rivals] == ["past-future"]
    assert any("do not tell" in doubt for doubt in advice.doubts)


def test_what_is_not_sure_is_said() -> None:
    advice = advise([measured("fcfs", 1, [1.0, 0.9, 1.0], [1.0, 1.0, 1.0])], 0.95)
    assert advice.holds and any("varies" in doubt for doubt in advice.doubts)
    rows = [measured("fcfs", 1, [0.5, 0.4], [9.0, 9.0]), measured("farsight", 1, [0.8, 0.7], [9.0, 9.0])]
    advice = advise(rows, 0.99)
    assert advice.best.setup.preset == "farsight" and not advice.holds
    assert advice.reason.startswith("No preset keeps the targets for 99 % of the requests, even on 1 replica;")


def test_presets_that_return_outputs_whole_are_not_advised() -> None:
    rows = [measured("magnus", 1, [1.0, 1.0], [0.1, 0.1]), measured("fcfs", 1, [1.0, 1.0], [1.0, 1.0])]
    assert advise(rows, 0.9).best.setup.preset == "fcfs"
    with pytest.raises(InvalidValueError, match="one that streams"):
        advise(rows[:1], 0.9)


def test_intervals_are_students_within_what_a_share_can_be() -> None:
    found = interval([1.0, 2.0, 3.0])
    assert found.mean == 2.0 and found.high == pytest.approx(2.0 + 4.302653 / math.sqrt(3))
    assert interval([1.5]).low is None
    row = measured("fcfs", 1, [0.1, 1.0], [1.0, 30.0])
    share, jct = row.interval("goodput_share"), row.interval("jct_s_mean")
    assert share is not None and (share.low, share.high) == (0.0, 1.0)
    assert jct is not None and jct.low == 0.0


def test_only_windows_that_every_choice_has_run_count() -> None:
    options = setups(["fcfs", "farsight"], 2)
    runs = list(in_order(options, 2))
    assert [index for index, _ in runs] == [0] * 4 + [1] * 4
    row: dict[str, float | None] = dict.fromkeys(METRICS, 1.0)
    assert all(len(each.windows) == 1 for each in complete(dict.fromkeys(runs[:7], row), options, 2))
    assert all(len(each.windows) == 2 for each in complete(dict.fromkeys(runs, row), options, 2))


def test_windows_are_spread_over_the_traffic_and_begin_at_zero() -> None:
    arrivals = make_arrivals(Experiment(num_requests=200, rate=5.0))
    windows = cut_windows(arrivals, 50, 3)
    assert [window[0].request_id for window in windows] == [arrivals[first].request_id for first in (0, 75, 150)]
    for window in windows:
        assert len(window) == 50
        assert window[0].arrived_at == 0
        assert all(early.arrived_at <= late.arrived_at for early, late in pairwise(window))
    assert [len(window) for window in cut_windows(arrivals, 500, 3)] == [200]
    with pytest.raises(InvalidValueError, match="at least 20 requests"):
        cut_windows(arrivals[:19], 50, 3)


def test_more_replicas_help_a_real_overload() -> None:
    experiment = Experiment(rate=12.0, num_requests=120, predictor="history")
    (window,) = cut_windows(make_arrivals(experiment), 120, 1)
    options = setups(["fcfs"], 3)
    results = {(0, setup): run_setup(experiment, setup, window) for setup in options}
    rows = complete(results, options, 1)
    means = [row.mean("jct_s_mean") for row in rows]
    assert means == sorted(means, reverse=True)
    shown = to_dict(rows, advise(rows, 0.5))
    assert shown["recommended"]["preset"] == "fcfs"
    assert {row["replicas"] for row in shown["options"]} == {1, 2, 3}
