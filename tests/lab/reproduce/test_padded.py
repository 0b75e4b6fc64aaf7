"""Batch mode under virtual time, by hand: padding, splits, workers that pull."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from farsight.core.costs import StepCost
from farsight.core.forecast import QUANTILES, Forecast
from farsight.estimator.knn import padded_batch_s
from farsight.kvcache import StaticExecutor
from farsight.policies.batching.base import BatchPolicy
from farsight.policies.batching.fcfs import FcfsBatches
from farsight.policies.batching.multi_bin import MultiBinBatcher
from farsight.policies.batching.wma import WmaBatcher
from farsight.policies.compose import build_batch_runner
from farsight.policies.fleet.batch_scheduler import BatchScheduler
from farsight.simulator.cluster.fleet import Fleet, FleetShape
from farsight.simulator.cluster.latency import A100_7B, LatencyModel, LinearLatency
from farsight.simulator.cluster.records import Record, Recorder, Timeline
from farsight.simulator.cluster.replica import Execution, ReplicaShape
from farsight.simulator.traffic.workload import SimRequest
from lab.reproduce.padded import num_computed_tokens, padded_fleet
from tests.sim.runs import STEP


def ends(recorder: Recorder) -> dict[str, float]:
    return {record.arrival.request_id: record.finished_at for record in recorder.done}


def arrivals(*output_lens: int, every_s: float = 0.0) -> list[SimRequest]:
    names = "abcdefgh"
    return [SimRequest(names[i], i * every_s, 10, n, 30) for i, n in enumerate(output_lens)]


def fleet(
    batcher: BatchPolicy,
    latency: LatencyModel = STEP,
    *,
    kv_tokens: int = 1000,
    block_size: int = 1,
    max_batch_tokens: int = 2048,
    execution: Execution = "static",
    num_workers: int = 1,
    announce_s: float = 0.0,
    clients: int | None = None,
    timeline: Timeline | None = None,
) -> Fleet:
    """Workers as a server has them: prompts in chunks, blocks, no reload."""
    replica = ReplicaShape(kv_tokens // block_size, block_size, max_batch_tokens=max_batch_tokens, execution=execution)
    return Fleet(
        FleetShape(replica, latency, num_workers, announce_s),
        BatchScheduler(batcher, lambda *shape: padded_batch_s(latency, *shape)),
        lambda _: build_batch_runner(replica.max_num_seqs),
        clients=clients,
        timeline=timeline,
    )


def test_a_static_batch_is_returned_when_its_longest_ends() -> None:
    made = padded_fleet(FcfsBatches(2), STEP)
    assert ends(made.run(arrivals(1, 5, 2, 6))) == {"a": 5, "b": 5, "c": 11, "d": 11}
    assert num_computed_tokens(made) == 22
    assert [(each.num_requests, each.output_len, each.duration_s) for each in made.batches] == [(2, 5, 5), (2, 6, 6)]


def test_a_ragged_batch_returns_each_when_it_ends() -> None:
    made = fleet(FcfsBatches(2), execution="ragged")
    assert ends(made.run(arrivals(1, 5, 2, 6))) == {"a": 1, "b": 5, "c": 7, "d": 11}
    assert num_computed_tokens(made) == 14


def test_padding_costs_what_the_longest_prompt_costs() -> None:
    latency = LinearLatency(StepCost(0.0, 1.0, 0.0, 0.1))
    pair = [SimRequest("a", 0.0, 10, 3, 3), SimRequest("b", 0.0, 4, 1, 3)]
    # prefill 2 x 10 tokens, then two steps over 2 x 11 and 2 x 12 tokens of context
    assert ends(padded_fleet(FcfsBatches(2), latency).run(pair)) == pytest.approx(dict.fromkeys("ab", 20 + 2.2 + 2.4))
    assert padded_batch_s(latency.cost, 2, 10, 3) == pytest.approx(20 + 2.2 + 2.4)
    assert ends(fleet(FcfsBatches(2), latency, execution="ragged").run(pair)) == pytest.approx(
        {"a": 14 + 1.1 + 1.2, "b": 14}
    )


def test_prompts_beyond_the_tokens_of_a_step_take_several() -> None:
    """2 x 10 padded tokens in steps of 8 are three steps, then four for the longer output."""
    made = fleet(FcfsBatches(2), max_batch_tokens=8)
    assert ends(made.run([SimRequest("a", 0.0, 10, 5, 9), SimRequest("b", 0.0, 4, 2, 9)])) == {
        "a": 7,
        "b": 7,
    }
    assert made.recorder.usage["0"].num_steps == 7


def test_who_comes_while_a_batch_runs_waits_for_its_end() -> None:
    recorder = padded_fleet(FcfsBatches(2), STEP).run(arrivals(4, 4, 2, every_s=1.0))
    assert ends(recorder) == {"a": 4, "b": 8, "c": 8}
    done = fleet(FcfsBatches(2), clients=2).run(arrivals(3, 3, 3, 3)).done
    assert [record.arrival.arrived_at for record in done] == [0, 0, 3, 3], "a closed loop"
    two = padded_fleet(FcfsBatches(1), STEP, 2).run(arrivals(4, 2, 3))
    assert ends(two) == {"a": 4, "b": 2, "c": 5}, "two workers pull from one queue"


def test_a_batch_that_runs_out_of_memory_is_split_after_a_reload() -> None:
    """Two of 10 + 20 tokens in 50: they break off after 15 steps, then each runs alone."""
    made = padded_fleet(FcfsBatches(2), STEP, kv_tokens=50, reload_s=7.0)
    recorder = made.run(arrivals(20, 20))
    assert isinstance(made.machine, BatchScheduler) and made.machine.num_splits == 1
    assert all(record.num_evictions == 1 for record in recorder.done)
    assert ends(recorder) == {"a": 15 + 7 + 20, "b": 15 + 7 + 40}
    assert num_computed_tokens(made) == 2 * 15 + 20 + 20, "what broke off was computed for nothing"
    made = padded_fleet(FcfsBatches(2), STEP, 2, kv_tokens=50, reload_s=7.0)
    assert ends(made.run(arrivals(20, 20))) == {"a": 15 + 20, "b": 15 + 7 + 20}, "another worker takes a half"


@pytest.mark.parametrize(("announce_s", "back_at"), [(0.0, 15.0), (0.5, 15.5), (4.0, 16.0)])
def test_a_broken_batch_comes_back_with_the_next_announcement(announce_s: float, back_at: float) -> None:
    made = fleet(FcfsBatches(2), kv_tokens=50, announce_s=announce_s)
    assert ends(made.run(arrivals(20, 20))) == {"a": back_at + 20, "b": back_at + 40}


def test_a_ragged_batch_that_breaks_off_keeps_the_tokens_that_its_clients_have() -> None:
    """Both have 16 tokens when the KV of all that is known fills the 50; each then computes it again and goes on."""
    made = fleet(FcfsBatches(2), kv_tokens=50, execution="ragged")
    assert ends(made.run(arrivals(20, 20))) == {"a": 16 + 4, "b": 16 + 8}
    assert num_computed_tokens(made) == 40


def test_prompts_that_do_not_fit_together_are_split_before_a_step() -> None:
    made = fleet(FcfsBatches(4), kv_tokens=40)
    assert ends(made.run(arrivals(3, 3, 3, 3))) == {"a": 3, "b": 3, "c": 6, "d": 6}
    assert isinstance(made.machine, BatchScheduler) and made.machine.num_splits == 1
    made = padded_fleet(FcfsBatches(1), STEP, kv_tokens=15)
    recorder = made.run([SimRequest("a", 0.0, 10, 3, 30), SimRequest("b", 0.0, 10, 3, 5)])
    assert (made.refused, ends(recorder)) == (["a"], {"b": 3}), "what may never fit is refused"


def test_a_bin_is_sealed_by_the_time_that_passes_or_when_no_more_will_come() -> None:
    made = padded_fleet(MultiBinBatcher((0, 100), 4), STEP)
    assert ends(made.run(arrivals(2, 2, 2, every_s=10.0))) == dict.fromkeys("abc", 22.0)
    made = fleet(MultiBinBatcher((0, 100), 4, max_wait_s=3.0))
    assert ends(made.run(arrivals(2, 2, 2, every_s=2.0))) == {"a": 5.0, "b": 5.0, "c": 9.0}


def test_batches_are_sampled_and_use_the_memory_of_padded_sequences() -> None:
    """Two of 10 + 4 tokens, padded: 22 tokens in the prefill, then 24, 26 and 28."""
    made = fleet(FcfsBatches(2))
    made.run(arrivals(4, 1))
    usage = made.recorder.usage["0"]
    assert (usage.num_steps, usage.token_steps, usage.peak_tokens) == (4, 22 + 24 + 26 + 28, 28)
    timeline = Timeline(interval_s=1.0)
    fleet(FcfsBatches(2), timeline=timeline).run(arrivals(4, 4, 4))
    assert timeline.series("running")[:, 0].tolist() == [0, 2, 2, 2, 2, 1, 1, 1, 1]
    # A sample between two steps counts the tokens of the step that begins.
    assert timeline.series("used_tokens")[1:4, 0].tolist() == [22, 26, 28]


def random_life(
    make: Callable[[], BatchPolicy], seed: int, execution: Execution, latency: LatencyModel
) -> list[Record]:
    """Two workers with too little memory, and forecasts that are wrong."""
    rng = np.random.default_rng(seed)
    made, at = [], 0.0
    for i in range(90):
        at += float(rng.exponential(0.05))
        output_len = int(rng.integers(1, 60))
        mean = float(max(1, output_len + int(rng.integers(-20, 10))))
        forecast = Forecast(mean, (mean,) * len(QUANTILES), 1, "given", 1)
        made.append(SimRequest(f"r{i}", at, int(rng.integers(1, 40)), output_len, 60, forecast=forecast))
    small = fleet(
        make(),
        latency,
        kv_tokens=400,
        block_size=4,
        max_batch_tokens=32,
        execution=execution,
        num_workers=2,
        announce_s=0.5,
    )
    recorder = small.run(made)
    assert len(recorder.done) == 90
    assert all(record.num_tokens == record.arrival.output_len for record in recorder.done)
    return recorder.done


BATCHERS: dict[str, Callable[[], BatchPolicy]] = {
    "fcfs": lambda: FcfsBatches(8),
    "wma": lambda: WmaBatcher(400, lambda batches, now: batches[-1]),
    "bins": lambda: MultiBinBatcher((0, 20, 60), 8, max_wait_s=1.0),
}


@pytest.mark.parametrize("name", BATCHERS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 9))])
def test_padded_steps_taken_at_once_change_nothing(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    latency = LinearLatency(StepCost(0.01, 0.001, 0.002, 0.0001))
    at_once = random_life(BATCHERS[name], seed, "static", latency)
    assert name == "bins" or sum(record.num_evictions for record in at_once) > 0, "batches have broken off"
    monkeypatch.setattr(StaticExecutor, "horizon", lambda self, batch, most: 1)
    one_by_one = random_life(BATCHERS[name], seed, "static", latency)
    for fast, slow in zip(at_once, one_by_one, strict=True):
        assert (fast.arrival, fast.replica, fast.num_evictions) == (slow.arrival, slow.replica, slow.num_evictions)
        assert fast.finished_at == pytest.approx(slow.finished_at, rel=1e-9)
    random_life(BATCHERS[name], seed, "ragged", A100_7B)  # serves every request once
