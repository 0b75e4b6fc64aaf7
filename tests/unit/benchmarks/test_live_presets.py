"""Live presets: what a claim makes of its runs, and one claim measured on live components, small."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.live_presets import __main__ as script
from benchmarks.live_presets import command, runs
from benchmarks.live_presets.claims import CLAIMS, Claim
from benchmarks.live_presets.live import run_live
from benchmarks.live_presets.priority import before_others, can_come_first
from benchmarks.live_presets.runs import Figures, Run, Store
from benchmarks.live_presets.setups import SETUPS, SYSTEMS
from benchmarks.live_presets.study import Study
from farsight.core.errors import ConfigError
from farsight.engine.devices import emulated
from farsight.simulator.cluster.records import Record
from farsight.simulator.summary import Sla

KEYS = {"claim", "ratio", "low", "high", "target", "verdict"}
CLAIM = Claim("a / b", "zipf 1.1", "a", "b", "jct_s", 0.5)


def row(claim: Claim, live: Mapping[str, list[float]], simulated: Mapping[str, list[float]] | None = None) -> dict:
    """The row of a claim, from values of ``jct_s`` by system, one a seed."""

    def figures(system: str, seed: int, is_live: bool) -> Figures:
        return Figures(jct_s=(live if is_live or simulated is None else simulated)[system][seed], gap_s=0.001)

    return claim.row(range(len(live["a"])), 30, figures)


def test_a_row_has_the_paired_ratio_and_its_interval() -> None:
    found = row(CLAIM, {"a": [1.0, 2.0, 4.4], "b": [4.0, 8.0, 16.0]}, {"a": [3.0] * 3, "b": [10.0] * 3})
    assert found.keys() >= KEYS
    ratio = (0.25 * 0.25 * 0.275) ** (1 / 3)
    assert (found["ratio"], found["live"], found["simulated"]) == pytest.approx((ratio, ratio, 0.3))
    assert found["low"] < found["ratio"] < found["high"]
    assert (found["target"], found["verdict"], found["seeds"], found["gap_ms"]) == ("<= 0.5", "holds", 3, 1.0)


@pytest.mark.parametrize(
    ("ours", "verdict"), [([4.0, 4.1, 3.9], "holds"), ([5.2, 6.0, 4.5], "open"), ([6.0, 6.1, 6.2], "off")]
)
def test_a_target_is_held_missed_or_left_open(ours: list[float], verdict: str) -> None:
    assert row(CLAIM, {"a": ours, "b": [10.0] * 3})["verdict"] == verdict
    least = Claim("a / b", "zipf 1.1", "a", "b", "jct_s", 0.5, at_most=False)
    assert row(least, {"a": [10.0 - each for each in ours], "b": [10.0] * 3})["verdict"] == verdict


def test_beside_the_simulation_the_ratio_of_ratios_counts() -> None:
    claim = Claim("a / b", "zipf 1.1", "a", "b", "jct_s", 1.1, to_simulation=True)
    found = row(claim, {"a": [6.0, 6.0], "b": [10.0, 10.0]}, {"a": [4.0, 4.0], "b": [8.0, 8.0]})
    assert (found["ratio"], found["live"], found["simulated"]) == pytest.approx((1.2, 0.6, 0.5))
    assert found["verdict"] == "off"
    found = row(Claim("a", "zipf 1.1", "a", "", "jct_s", 0.05), {"a": [0.0, 0.02, 0.04]})
    assert (found["ratio"], found["verdict"]) == (pytest.approx(0.02), "holds"), "without a base the mean counts"
    assert found["low"] == pytest.approx(0.02 - 4.3027 * 0.02 / math.sqrt(3), abs=1e-5)


def test_a_run_that_was_refused_or_disturbed_by_other_work_decides_nothing() -> None:
    def refused(system: str, seed: int, live: bool) -> Figures:
        return Figures(refused="no such setting") if system == "b" else Figures(1.0)

    def disturbed(system: str, seed: int, live: bool) -> Figures:
        return Figures(1.0, gap_s=0.001, lag_s=0.05 if (system, seed, live) == ("b", 1, True) else 0.001)

    found = CLAIM.row(range(2), 30, refused)
    assert found.keys() >= KEYS
    assert (found["verdict"], found["ratio"], found["why"]) == ("not served", None, "no such setting")
    found = CLAIM.row(range(2), 30, disturbed)
    assert (found["verdict"], found["ratio"], found["lag_ms"]) == ("disturbed", 1.0, 50.0)
    setup = SETUPS["zipf 1.1"].sized(3)
    with pytest.raises(ConfigError, match=r"scheduler\.no_such"):
        run_live(setup.arrivals(1), setup.hardware, {"scheduler": {"no_such": 1}})
    assert len({claim.name for claim in CLAIMS}) == len(CLAIMS)
    for claim in CLAIMS:
        assert claim.setup in SETUPS and set(claim.systems) <= SYSTEMS.keys() and hasattr(Figures(), claim.metric)


def test_results_are_kept_and_the_last_of_a_run_counts(tmp_path: Path) -> None:
    store = Store(tmp_path / "runs.jsonl")
    run = Run("zipf 1.1", "fcfs", 1, 30, 1.0, True)
    store.put(run, Figures(refused="not yet"))
    store.put(run, Figures(2.0, evictions=math.nan))
    again = Store(tmp_path / "runs.jsonl").get(run)
    assert again is not None and (again.jct_s, again.refused) == (2.0, "") and math.isnan(again.evictions)


def test_a_claim_is_measured_on_live_components_and_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--only", "farsight-mean / fastserve, zipf", "--requests", "12", "--jobs", "1", "--speed", "8", "--json"]
    words += ["--cache", str(tmp_path / "sub" / "runs.jsonl")]
    began = time.monotonic()
    [found] = script.main([*words, "--seeds", "1"])
    took_s = time.monotonic() - began
    assert json.loads(capsys.readouterr().out) == found
    assert found.keys() >= KEYS and found["requests"] == 12
    store = Store(tmp_path / "sub" / "runs.jsonl")
    live_s: list[float] = []
    simulated_s: list[float] = []
    for system in ("farsight-mean", "fastserve"):
        for figures, is_live in ((live_s, True), (simulated_s, False)):
            of_run = store.get(Run("zipf 1.1", system, 11, 12, 8.0 if is_live else 1.0, is_live))
            assert of_run is not None
            figures.append(of_run.jct_s)
    assert 0.2 < found["simulated"] < 5
    for name, (ours, base) in (("live", live_s), ("simulated", simulated_s)):
        assert found[name] == pytest.approx(ours / base)
    # How long a live run takes hangs on what else the machine does: no less than the device, no more than this test.
    for run_s, least_s in zip(live_s, simulated_s, strict=True):
        assert emulated.LEAST_SHARE * least_s < run_s < 8.0 * took_s
    measured: list[int] = []

    def simulated_instead(study: Study, path: Path, group: list[Run], **_: bool) -> None:
        store = Store(path)
        for run in group:
            if store.get(run) is None:
                measured.append(run.seed)
                store.put(run, Figures(3.0, gap_s=0.0))

    monkeypatch.setattr(command, "measure", simulated_instead)
    [again] = script.main([*words, "--seeds", "2"])
    assert set(measured) == {12} and again["seeds"] == 2
    with pytest.raises(SystemExit, match="no claim is called so"):
        script.main(["--only", "nobody"])


def test_a_run_sees_every_request_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulated, "LEAST_SHARE", 1.0)  # else the device hurries where the machine was late
    setup = SETUPS["zipf15 0.9"].sized(10)
    arrivals = setup.arrivals(3)
    settings = SYSTEMS["fastserve-reactive"].settings
    assert settings is not None
    served = run_live(arrivals, setup.hardware, settings, speed=10.0)
    ended: dict[str, Record] = {each.arrival.request_id: each for each in served.records}
    assert ended.keys() == {each.request_id for each in arrivals}
    for each in arrivals:
        record = ended[each.request_id]
        assert record.num_tokens == each.output_len
        steps_s = (each.output_len - 1) * setup.hardware.profile.cost.decode_s(each.prompt_len)
        assert record.jct_s > 0.9 * steps_s, "no faster than the device"
    lenient, strict = (
        Sla(sorted(each.ttft_s for each in served.records)[index], math.inf) for index in (len(arrivals) - 1, 0)
    )
    figures = runs.figures(served.records, lenient, 0.0)
    assert figures.throughput == figures.goodput > 0
    assert 0 < runs.figures(served.records, strict, 0.0).goodput < figures.throughput


@pytest.mark.skipif(not can_come_first(), reason="only root may come before others")
def test_what_comes_before_others_does_so_only_for_a_while() -> None:
    with before_others(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(os.sched_getscheduler, 0).result() == os.SCHED_RR
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
