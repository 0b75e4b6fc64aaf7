"""The numbers of a run, by hand."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from rich.console import Console

from farsight.core.costs import StepCost
from farsight.core.errors import InvalidValueError
from farsight.policies.batching.fcfs import FcfsBatches
from farsight.simulator.cluster.latency import GPUS, MODELS, LatencyModel, LinearLatency, Roofline
from farsight.simulator.cluster.records import Record, Recorder
from farsight.simulator.summary import MeanAndPercentiles, Sla, Summary, alone_s, show, summarize, tables
from farsight.simulator.traffic.workload import SimRequest
from lab.reproduce.padded import num_computed_tokens, padded_fleet
from tests.sim.runs import STEP, arrivals, make_fleet

LATENCIES, POINTS = ("ttft_s", "tpot_s", "itl_s", "mtpot_s", "jct_s", "slowdown"), ("mean", "p50", "p99")
KEYS = {f"{name}_{point}" for name in LATENCIES for point in POINTS}
KEYS |= {"num_requests", "num_failed", "num_preempted", "num_evictions", "num_swaps", "num_steps", "makespan_s"}
KEYS |= {"goodput_share", "goodput_requests_per_s", "requests_per_s", "output_tokens_per_s", "total_tokens_per_s"}
KEYS |= {
    "evictions_per_100_requests",
    "swaps_per_100_requests",
    "prefix_hit_rate",
    "num_images_encoded",
    "mean_replicas",
}
KEYS |= {"memory_mean_tokens", "memory_mean_share", "memory_peak_tokens", "memory_peak_share"}


def run(*requests: tuple[float, int, int], sla: Sla | None = None, num_failed: int = 0, **shape: Any) -> Summary:
    fleet, replica = make_fleet(**shape)
    return summarize(fleet.run(arrivals(*requests)), replica, STEP, sla or Sla(), num_failed=num_failed)


def test_two_requests_in_turn() -> None:
    """One place: r0 from 2 to 5 in three steps, r1 from 5 to 7 in two; both came at 2."""
    got = run((2, 10, 3), (2, 20, 2), max_num_seqs=1)
    assert got.ttft_s == MeanAndPercentiles(2.5, 1, 4)
    assert got.jct_s == MeanAndPercentiles(4, 3, 5)
    assert dataclasses.astuple(got.slowdown) == (pytest.approx((1 + 2.5) / 2), 1, 2.5)
    assert got.tpot_s == got.mtpot_s == MeanAndPercentiles(1, 1, 1)
    assert (got.num_requests, got.num_steps, got.makespan_s) == (2, 5, 5)
    assert got.requests_per_s == pytest.approx(0.4) and got.output_tokens_per_s == pytest.approx(1)
    assert got.total_tokens_per_s == pytest.approx((10 + 20 + 3 + 2) / 5)
    assert (got.num_preempted, got.num_evictions, got.num_swaps, got.num_failed) == (0, 0, 0, 0)
    assert got.to_dict().keys() == KEYS
    many = run(*((0.0, 1, 1) for _ in range(200)), max_num_seqs=1)
    assert (many.jct_s.p50, many.jct_s.p99) == (100, 198), "by nearest rank, of 1 ... 200 s"
    assert many.tpot_s == many.itl_s == many.mtpot_s == MeanAndPercentiles(), "single tokens have no gaps"
    assert many.goodput_share == 0.05


def test_inter_token_latency_counts_every_gap() -> None:
    """Three gaps of r0, one of r1: those of a step with the other's prefill are as long as that step."""
    fleet, shape = make_fleet(latency=(latency := LinearLatency(StepCost(1.0, 0.5, 0.0, 0.0))))
    got = summarize(fleet.run(arrivals((0, 2, 4), (2.5, 4, 2))), shape, latency, Sla())
    # r0: prefill until 2, a step to 3, one with r1's prefill to 6, one to 7; r1: first at 6, second at 7
    assert got.itl_s.mean == pytest.approx((1 + 3 + 1 + 1) / 4)
    assert got.itl_s.p50 == pytest.approx(1, rel=0.01) and got.itl_s.p99 == pytest.approx(3, rel=0.01)
    assert dataclasses.astuple(got.mtpot_s) == pytest.approx((2, 1, 3))


def test_goodput_counts_those_within_both_limits_among_all() -> None:
    requests = (0.0, 10, 3), (0.0, 20, 2)
    both = run(*requests, sla=Sla(4.0, 1.0), max_num_seqs=1)
    assert both.goodput_share == 1 and both.goodput_requests_per_s == pytest.approx(2 / 5)
    late = run(*requests, sla=Sla(3.9, 1.0), max_num_seqs=1)
    assert late.goodput_share == 0.5 and late.goodput_requests_per_s == pytest.approx(1 / 5)
    assert run(*requests, sla=Sla(4.0, 0.9), max_num_seqs=1).goodput_share == 0
    assert run(*requests, num_failed=2, max_num_seqs=1).goodput_share == 0.5
    for sla in ({"ttft_s": 0.0}, {"mtpot_s": -1.0}, {"ttft_s": math.nan}):
        with pytest.raises(InvalidValueError, match="seconds above 0"):
            Sla(**sla)


def test_evictions_and_swaps() -> None:
    """Two of 4 + 5 tokens in 12: the newer one makes way, its KV is computed again or comes back from the host."""
    for kv, counts in (("recompute-newest", (1, 0)), ("swap-newest", (0, 1))):
        fleet, shape = make_fleet(12, kv=kv)
        got = summarize(fleet.run(arrivals((0, 4, 5), (0, 4, 5))), shape, STEP, Sla())
        assert (got.num_evictions, got.num_swaps) == counts, kv
        assert got.num_preempted == 1
        per_100 = (got.evictions_per_100_requests, got.swaps_per_100_requests)
        assert per_100 == (50 * counts[0], 50 * counts[1])


def test_memory() -> None:
    """One request of 4 tokens: its KV has 4, 5, 6 tokens in three steps, of 10."""
    got = run((0, 4, 3), num_tokens=10)
    assert got.memory_mean_tokens == pytest.approx(5) and got.memory_mean_share == pytest.approx(0.5)
    assert got.memory_peak_tokens is not None
    assert got.memory_peak_share == pytest.approx(got.memory_peak_tokens / 10)
    assert 4 <= got.memory_peak_tokens <= 6


@pytest.mark.parametrize(
    "latency", [LinearLatency(StepCost(0.01, 1e-4, 2e-5, 2e-7)), Roofline(GPUS["a100-80g"], MODELS["opt-13b"])]
)
@pytest.mark.parametrize("prompt_len", [1, 2, 7, 8, 9, 16, 17, 1000])
@pytest.mark.parametrize("output_len", [1, 2, 33])
def test_alone_there_is_no_slowdown(latency: LatencyModel, prompt_len: int, output_len: int) -> None:
    fleet, shape = make_fleet(2000, max_batch_tokens=8, latency=latency)
    record = fleet.run(arrivals((0, prompt_len, output_len))).done[0]
    assert record.jct_s == pytest.approx(alone_s(prompt_len, output_len, 8, latency), rel=1e-9)
    assert summarize(fleet.recorder, shape, latency, Sla()).slowdown.p99 == pytest.approx(1, rel=1e-9)


def test_cached_tokens_and_padding_count_apart() -> None:
    """Static batches of 1 and 3 tokens: two are computed for no client; nothing is streamed."""
    hits = Recorder()
    for cached_len in (0, 30):
        record = Record(SimRequest("r", 0.0, 60, 1, 1), first_token_at=1.0, last_token_at=1.0, finished_at=1.0)
        record.num_tokens, record.cached_len = 1, cached_len
        hits.done.append(record)
    assert summarize(hits, make_fleet()[1], STEP, Sla()).prefix_hit_rate == pytest.approx(30 / 120)
    fleet = padded_fleet(FcfsBatches(2), STEP)
    recorder = fleet.run(arrivals((0, 4, 1), (0, 4, 3)))
    padding = num_computed_tokens(fleet) - 4
    got = summarize(recorder, make_fleet()[1], STEP, Sla(), num_padding_tokens=padding)
    assert got.output_tokens_per_s == pytest.approx(4 / 3)
    assert got.total_tokens_per_s == pytest.approx((8 + 4 + 2) / 3)
    assert got.tpot_s == got.itl_s == got.mtpot_s == MeanAndPercentiles()


def test_nothing_done() -> None:
    """Numbers that there are not are null, and nothing divides by 0."""
    got = summarize(Recorder(), make_fleet()[1], STEP, Sla(), num_failed=3)
    assert (got.num_requests, got.num_failed, got.jct_s, got.goodput_share) == (0, 3, MeanAndPercentiles(), 0)
    assert json.loads(json.dumps(got.to_dict(), allow_nan=False))["ttft_s_p99"] is None


def test_tables_name_every_latency() -> None:
    console = Console(width=120)
    with console.capture() as captured:
        for table in tables(run((0, 10, 3), (0, 20, 1))):
            console.print(table)
    text = captured.get()
    for heading in ("TTFT s", "TPOT s", "ITL s", "MTPOT s", "JCT s", "slowdown", "output tokens/s", "prefix hit rate"):
        assert heading in text
    values = {None: "-", 0: "0", 3: "3", 1234567: "1,234,567", 123.456: "123", 0.12345: "0.123", 2e-5: "2.0e-05"}
    assert {value: show(value) for value in values} == values and show(0.0) == "0"
