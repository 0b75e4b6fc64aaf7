"""Presets side by side: pairing and intervals."""

from __future__ import annotations

import json
import math
import statistics
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from farsight.core.errors import InvalidValueError
from farsight.simulator.compare import Compared, compare, comparison_table, paired_ratio, paired_ratios
from farsight.simulator.experiment import Experiment, make_arrivals
from farsight.simulator.results import to_json
from farsight.simulator.run import RunOutcome, run

SMALL = Experiment(num_requests=40, kv_tokens=4000)


def test_a_ratio_by_hand() -> None:
    """Logs of 2, 4, 8: mean log 4, sd log 2, t = 4.302653 for two degrees of freedom."""
    ratio = paired_ratio([(2.0, 1.0), (8.0, 2.0), (4.0, 0.5)])
    assert ratio is not None and ratio.low is not None and ratio.high is not None
    margin = 4.302653 * math.log(2) / math.sqrt(3)
    assert ratio.mean == pytest.approx(4)
    assert (ratio.low, ratio.high) == pytest.approx((4 * math.exp(-margin), 4 * math.exp(margin)))
    alone = paired_ratio([(3.0, 2.0)])
    assert alone is not None and alone.mean == pytest.approx(1.5) and alone.low is alone.high is None
    for pair in ((1.0, 0.0), (0.0, 1.0), (None, 1.0), (1.0, None)):
        assert paired_ratio([pair]) is paired_ratio([(1.0, 1.0), pair]) is None


def test_the_interval_covers_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(2000):
        base = np.exp(rng.normal(0, 1.0, 5))
        ours = base * np.exp(rng.normal(math.log(0.7), 0.2, 5))
        ratio = paired_ratio(list(zip(ours.tolist(), base.tolist(), strict=True)))
        assert ratio is not None and ratio.low is not None and ratio.high is not None
        covered += ratio.low <= 0.7 <= ratio.high
    assert covered / 2000 == pytest.approx(0.95, abs=0.015)


def test_every_preset_has_the_workload_of_each_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside itself a preset is the same, to the last digit."""
    ran: list[tuple[str, int]] = []
    told: list[int] = []

    def note(experiment: Experiment, *args: Any, **kwargs: Any) -> RunOutcome:
        ran.append((experiment.preset, experiment.seed))
        return run(experiment, *args, **kwargs)

    monkeypatch.setattr("farsight.simulator.compare.run", note)
    (got,) = compare(SMALL, ["fcfs"], [3, 5], told.append)
    assert ran == [("fcfs", 3), ("fcfs", 5)], "policies may draw as well as workloads"
    assert told == sorted(told) and told[-1] == 80
    assert got.preset == got.base == "fcfs" and got.seeds == (3, 5)
    for seed, summary in zip(got.seeds, got.runs, strict=True):
        experiment = Experiment(num_requests=40, kv_tokens=4000, seed=seed)
        assert summary == run(experiment, make_arrivals(experiment)).summary
    assert got.runs[0] != got.runs[1]
    ratio = got.ratios["jct_s_mean"]
    assert ratio is not None and (ratio.mean, ratio.low, ratio.high) == (1, 1, 1)
    assert got.mean("jct_s_mean") == statistics.fmean(each.to_dict()["jct_s_mean"] or 0 for each in got.runs)
    for presets, seeds in (([], [0]), (["fcfs"], []), (["fcfs", "fcfs"], [0]), (["fcfs"], [1, 1])):
        with pytest.raises(InvalidValueError, match="each once"):
            compare(SMALL, presets, seeds)


def test_the_same_workloads_on_a_small_and_a_large_pool_differ_in_every_pair() -> None:
    runs = {}
    for name, kv_tokens in (("large", 40_000), ("small", 2500)):
        experiments = [Experiment(num_requests=40, kv_tokens=kv_tokens, rate=20.0, seed=seed) for seed in range(3)]
        runs[name] = tuple(run(each, make_arrivals(each)).summary for each in experiments)
    base = runs["large"]
    both = [Compared(name, "large", (0, 1, 2), each, paired_ratios(each, base)) for name, each in runs.items()]
    ratio, row = both[1].ratios["ttft_s_mean"], both[1].to_dict()
    assert ratio is not None and ratio.low is not None and ratio.low > 1
    assert sorted(row) == ["base", "metrics", "preset", "seeds"]
    assert sorted(row["metrics"]["jct_s_mean"]) == ["mean", "ratio", "ratio_high", "ratio_low", "values"]
    assert len(row["metrics"]["jct_s_mean"]["values"]) == 3
    assert row["metrics"]["prefix_hit_rate"]["ratio"] is None
    assert json.loads(to_json(row)) == row
    console = Console(width=120)
    with console.capture() as captured:
        console.print(comparison_table(both))
    assert "small / large" in captured.get() and " to " in captured.get()
