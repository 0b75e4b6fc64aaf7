"""The runs behind Past-Future's table and figures, on small workloads."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from farsight.policies.admission.watermark import Aggressive
from farsight.policies.interfaces import Job
from farsight.simulator.cluster.latency import GPUS, MODELS, Roofline
from farsight.simulator.cluster.records import Record
from farsight.simulator.summary import Sla
from farsight.simulator.traffic.lengths import LengthPair, Uniform
from farsight.simulator.traffic.workload import SimRequest
from lab.reproduce.past_future import (
    PAST_FUTURE,
    TABLE_1,
    figure_1,
    figure_7,
    figure_8,
    goodput,
    table_1_line,
)
from lab.reproduce.past_future_images import PER_IMAGE, TABLE_2, OneGpu, questions, table_2_line
from lab.reproduce.past_future_runs import (
    ORACLE,
    PastFutureOutcome,
    Watched,
    adjacent_similarity,
    aggressive,
    conservative,
    distant_similarity,
    figure_3,
    figure_4,
    past_future,
    requests,
    serve,
    similarity,
)
from lab.reproduce.register import REPRODUCTIONS

SMALL = LengthPair(Uniform(5, 60), Uniform(50, 100), 100)


def served(method: str, **options: Any) -> PastFutureOutcome:
    methods = {"oracle": ORACLE, "bold": aggressive(0.99), "careful": conservative(), "ours": past_future(0.05)}
    return serve(requests(SMALL, 120), methods[method], capacity=1500, **options)


def test_all_names_are_registered_and_their_cells_can_be_sent_to_processes() -> None:
    names = [f"past_future_{name}" for name in ("fig1", "table1", "window", "goodput", "varying", "table2")]
    assert [each.name for each in PAST_FUTURE] == names
    assert set(names) <= REPRODUCTIONS.keys()
    for each in PAST_FUTURE:
        pickle.loads(pickle.dumps(each.cells))


def test_the_table_has_27_lines_of_4_numbers() -> None:
    assert len(next(each for each in PAST_FUTURE if each.name == "past_future_table1").cells) == 27
    for methods, *lines in TABLE_1.values():
        assert len(methods) == len(lines) == 9
        assert {len(line) for line in lines} == {4}
    metrics = ["decoding steps", "current memory, %", "future required, %", "evictions for 100 requests"]
    rows = table_1_line("D3", 8, num_requests=20)
    assert [row.metric for row in rows] == metrics
    rows = table_1_line("D3", 7, num_requests=20)
    assert [row.metric for row in rows] == metrics[:3], "that it evicts nothing is its definition"
    assert {row.setting for row in rows} == {"D3, Conservative"}
    assert [row.reported and row.reported.value for row in rows] == [374250, 59.73, 61.59]
    assert json.loads(json.dumps(rows[0].as_dict()))["verdict"] == "off"
    for distribution, line in (("D1", 8), ("D2", 4), ("D3", 1), ("D3", 2), ("D2", 7)):
        rows = table_1_line(distribution, line, num_requests=12)
        bases = ["fitted", *["printed"] * 3] if line != 7 else ["fitted", "fitted", "printed"]
        assert [row.check.basis for row in rows] == bases, "no figure is exempt"


def test_few_evictions_are_not_three_times_as_many() -> None:
    """The promised 3 points are more than most lines report."""
    figures = [table_1_line("D3", line, num_requests=12)[3].reported for line in (1, 2, 5)]
    decides = {figure.value: figure.decides for figure in figures if figure is not None}
    assert decides == {2.59: True, 0.87: False, 3.23: True}
    assert [figure and figure.slack for figure in figures] == pytest.approx([2.0] * 3)


def test_the_methods_come_out_in_the_papers_order() -> None:
    oracle, bold, careful, ours, again = (served(name) for name in ("oracle", "bold", "careful", "ours", "ours"))
    assert [record.finished_at for record in ours.done] == [record.finished_at for record in again.done]
    assert requests(SMALL, 9) != requests(SMALL, 9, seed=1)
    assert oracle.evictions == careful.evictions == 0
    assert bold.evictions > 2 * ours.evictions
    assert bold.num_steps < oracle.num_steps < ours.num_steps < careful.num_steps
    assert careful.current_memory < ours.current_memory < bold.current_memory
    assert careful.future_required < ours.future_required < bold.future_required
    assert oracle.current_memory < oracle.future_required <= 100


def test_what_a_batch_will_need_is_noted_once_a_point() -> None:
    watched = Watched(Aggressive(1.0))
    a, b, c = (
        Job(arrival.request_id, 0.0, 10, 100, forecast=arrival.forecast)
        for arrival in requests(LengthPair(Uniform(10, 10), Uniform(20, 20), 100), 3)
    )
    watched.begin([], 1000)
    watched.add(a)
    watched.begin([a], 1000)
    assert watched.admits(b)
    watched.add(b)
    watched.add(c)
    watched.begin([a, b, c], 1000)
    assert watched.peaks == [30, 90]
    assert watched.reserve(1000) == 0


def test_what_a_batch_will_need_is_a_mean_over_steps() -> None:
    watched = Watched(Aggressive(1.0))
    a, b = (
        Job(arrival.request_id, 0.0, 10, 100, forecast=arrival.forecast)
        for arrival in requests(LengthPair(Uniform(10, 10), Uniform(20, 20), 100), 2)
    )
    watched.begin([], 1000)
    watched.add(a)
    a.output_len = 5
    watched.begin([a], 1000)
    watched.add(b)
    for output_len in (7, 20):
        a.output_len, b.output_len = output_len, output_len - 5
        watched.begin([a, b], 1000)
    assert watched.mean_peak == (5 * 30 + 15 * 55) / 20, "b has 15 tokens of KV when a ends with 30: 25 + 30"


def test_conservative_counts_what_it_is_told_to() -> None:
    for method, fits in ((conservative(), 220), (conservative(counts=40), 100), (conservative(2.0, 40), 50)):
        admission = method.make(100)
        for capacity in (fits - 1, fits):
            admission.begin([Job("a", 0.0, 10, 100)], capacity)
            assert admission.admits(Job("b", 0.0, 10, 100)) is (capacity == fits)


def test_histograms_of_neighbours_are_alike_where_lengths_drift() -> None:
    assert similarity([1, 2, 3], [4, 5, 6]) == pytest.approx(1)
    assert similarity([1, 1], [16, 17]) == 0
    assert similarity([1, 17], [1, 1]) == pytest.approx(1 / math.sqrt(2))
    rng = np.random.default_rng(0)
    drifting = [int(rng.integers(50 * (i // 200), 50 * (i // 200) + 200)) for i in range(2000)]
    assert adjacent_similarity(drifting, 200, 200, 200) > 0.5 > distant_similarity(drifting, 200)
    assert adjacent_similarity([7] * 100, 10, 5, 20) == pytest.approx(1)


def test_missing_traces_are_named_with_their_source(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("FARSIGHT_DATA", str(tmp_path))
    rows = [*figure_3(), *figure_4()]
    assert {row.verdict for row in rows} == {"exempt"}
    assert all("http" in row.remark for row in rows)


def test_goodput_counts_what_keeps_both_limits() -> None:
    def record(ttft_s: float, gap_s: float) -> Record:
        each = Record(SimRequest("r", 0.0, 1, 2, 2), first_token_at=ttft_s, max_gap_s=gap_s)
        each.finished_at = 20.0
        return each

    done = [record(1, 0.1), record(11, 0.1), record(1, 2.0), record(11, 2.0)]
    ours = goodput(PastFutureOutcome(1, 0.0, 0.0, 0.0, done, 0.0), Sla())
    assert (ours.good, ours.late, ours.stalled) == (0.05, 0.5, 0.5)


@pytest.mark.nightly
def test_the_figures_run_and_state_their_claims() -> None:
    rows = figure_1("D3", num_requests=40)
    assert len(rows) == 8
    assert {row.check.basis for row in rows} == {"order"}
    assert {row.verdict for row in rows} <= {"open", "off"}, "of one drawn workload"
    rows = figure_8(num_each=6)
    assert sum(row.verdict == "exempt" for row in rows) == 22
    assert sum("equal steps" in row.metric for row in rows) == 6


def test_clients_are_few_or_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.reproduce.past_future.SATURATING", {"small": (SMALL, 60, (1, 2, 4), (60, 8))})
    rows = figure_7("small")
    values = {(row.setting, row.metric): row for row in rows}
    assert len(rows) == 19
    assert values["small, 8 clients", "clients in time, at most"].ours > 0
    assert values["small, 8 clients, over Aggressive 99%", "goodput by gaps"].check.basis == "range"
    assert values["small, 1 clients", "goodput, Past-Future / Aggressive"].verdict == "open"
    assert values["small, 4 clients", "goodput, Past-Future / Aggressive"].verdict == "off"


def test_questions_share_pictures_as_in_the_data() -> None:
    line = TABLE_2[0]
    asked = questions(line, 800)
    assert asked == questions(line, 800) != questions(line, 800, seed=1)
    names = [each.images[0].name for each in asked]
    assert names == sorted(names, key=int)  # questions about one picture come together
    assert PER_IMAGE < 800 / len(set(names)) < 1.6 * PER_IMAGE
    assert all(1 <= each.output_len <= line.limit and each.images[0].tokens == 256 for each in asked)
    assert all(266 <= each.prompt_len <= 280 for each in asked)


def test_a_gpu_that_also_encodes_takes_the_time_of_the_pictures() -> None:
    gpu = Roofline(GPUS["a100-80g"], MODELS["qwen-vl-7b"])
    both, token_s = OneGpu(gpu, image_share=0.5), gpu.image_cost.token_s
    assert both.step_s(1000, 3, 90) == pytest.approx(gpu.step_s(1000, 3, 90) + 500 * token_s)
    assert both.decode_run_s(3, 90, 7) == gpu.decode_run_s(3, 90, 7) and both.copy_s(9) == gpu.copy_s(9)
    assert both.image_cost.is_free and not gpu.image_cost.is_free
    assert both.cost == replace(gpu.cost, prefill_token_s=gpu.cost.prefill_token_s + token_s * 0.5)


def test_a_line_compares_with_batches_and_with_another_admission() -> None:
    small = replace(TABLE_2[1], text=Uniform(5, 9), batch_size=1)
    one, eight = table_2_line(small, 48), table_2_line(replace(small, batch_size=8), 48)
    metrics = [row.metric for row in one]
    assert metrics == [row.metric for row in eight] and len(one) == 5
    by_metric = [{row.metric: row.ours for row in rows} for rows in (one, eight)]
    ratio, again, admission = metrics[2:]
    for found in by_metric:
        assert found[ratio] == pytest.approx(found[metrics[1]] / found[metrics[0]])
        assert 1.0 < found[again] <= found[ratio]
        assert found[admission] == pytest.approx(1.0, abs=0.05)
    assert by_metric[0][ratio] > by_metric[1][ratio]  # a batch of one computes its weights for one answer alone
    assert one[2].reported is not None and one[2].reported.value == pytest.approx(851.73 / 535.31)
