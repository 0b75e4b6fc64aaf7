"""Several batches in flight: a replica of pipeline stages against what its stages can do."""

from __future__ import annotations

import dataclasses

import pytest

from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.costs import StepCost
from farsight.core.errors import InvalidValueError
from farsight.policies.compose import build_router, build_scheduler
from farsight.policies.replica.scheduler import SchedulerLimits
from farsight.policies.settings import MlfqRules, PolicySettings
from farsight.simulator.cluster.fleet import Fleet, FleetShape
from farsight.simulator.cluster.latency import (
    A100_7B,
    GPUS,
    MODELS,
    LatencyModel,
    LinearLatency,
    Roofline,
)
from farsight.simulator.cluster.records import Recorder
from farsight.simulator.cluster.replica import Replica, ReplicaShape
from farsight.simulator.traffic.workload import SimRequest
from lab.reproduce.pipelined import PipelinedReplica, PipelineLatency, StageTimes

TWO_STAGES = LinearLatency(StepCost(0.060, 0.0, 0.006, 0.0))
"""Both together: 30 ms + 3 ms a sequence each."""


def run(arrivals: list[SimRequest], num_stages: int, preset: str = "fcfs", num_blocks: int = 4000) -> Recorder:
    num_seqs = 64
    shape = ReplicaShape(
        num_blocks, 16, num_blocks, max_num_seqs=num_seqs, max_batch_tokens=4096, look_every=1, num_stages=num_stages
    )
    settings = PolicySettings(
        SchedulerConfig(quantum_s=0.05, max_gap_ms=0.0), mlfq=MlfqRules(follows_cost=False), cost=TWO_STAGES.cost
    )
    limits = SchedulerLimits(num_seqs, 0)
    kind = PipelinedReplica if num_stages > 1 else Replica
    fleet = Fleet(
        FleetShape(shape, TWO_STAGES, kind=kind),
        build_router("fcfs"),
        lambda _: build_scheduler(preset, limits, settings),
    )
    recorder = fleet.run(arrivals)
    for replica in fleet.replicas:
        replica.executor.check_integrity()
    return recorder


def test_iterations_cut_off_are_refused_where_several_are_in_flight() -> None:
    settings = PolicySettings(SchedulerConfig(mlfq="preemption", max_gap_ms=0.0), mlfq=MlfqRules(follows_cost=False))
    shape = FleetShape(ReplicaShape(100, num_stages=2), TWO_STAGES, kind=PipelinedReplica)
    with pytest.raises(InvalidValueError, match="num_stages: got 2, expected 1 where iterations are cut off"):
        Fleet(shape, build_router("fcfs"), lambda _: build_scheduler("fastserve", SchedulerLimits(8, 0), settings))


def together(num: int, output_len: int = 400) -> list[SimRequest]:
    return [SimRequest(f"r{i}", 0.0, 1, output_len, output_len) for i in range(num)]


def seconds(recorder: Recorder) -> float:
    return max(record.finished_at for record in recorder.done)


@pytest.mark.parametrize(("num_seqs", "most"), [(8, 1.286), (32, 1.615)])
def test_two_batches_in_flight_give_what_two_stages_can(num_seqs: int, most: float) -> None:
    """ADR 25 has these factors: 2 (30 + 3 n) ms for n tokens, against 30 + 3 n / 2 ms for n / 2."""
    gain = seconds(run(together(num_seqs), 1)) / seconds(run(together(num_seqs), 2))
    assert gain == pytest.approx(most, rel=0.01)


def test_one_sequence_gains_nothing() -> None:
    alone, piped = run(together(1), 1), run(together(1), 2)
    assert seconds(piped) == pytest.approx(seconds(alone))
    assert piped.done[0].ttft_s == pytest.approx(0.066)


def test_stages_take_batches_in_turn() -> None:
    stages = StageTimes(2)
    assert stages.enter(0.0, 2.0) == 2.0
    assert stages.enter(0.0, 2.0) == 3.0, "the first stage is free after a second, and the second one follows it"
    assert stages.enter(0.0, 4.0) == 6.0, "both stages are free at 2 and 3 s"
    assert stages.enter(9.0, 1.0) == 10.0


def test_steps_whose_sequences_lose_their_memory_lose_only_those_tokens() -> None:
    """MLFQ in little memory: sequences are moved and dropped while they are in a step, and each still ends in full."""
    arrivals = [SimRequest(f"r{i}", 0.2 * i, 30 + i % 7, 40 + 9 * (i % 11), 200) for i in range(24)]
    recorder = run(arrivals, 2, "fastserve", num_blocks=40)
    assert {record.arrival.request_id: record.num_tokens for record in recorder.done} == {
        each.request_id: each.output_len for each in arrivals
    }
    assert sum(record.num_evictions + record.num_swaps for record in recorder.done) > 0


def test_a_batch_takes_all_stages_and_costs_one_interval() -> None:
    latency = PipelineLatency(Roofline(GPUS["a100-40g"], MODELS["opt-66b"], 4, 2))
    alone = Roofline(GPUS["a100-40g"], MODELS["opt-66b"], 4)
    assert latency.step_s(0, 8, 800) == alone.step_s(0, 8, 800)
    assert latency.decode_run_s(8, 800, 5) == alone.decode_run_s(8, 800, 5)
    assert latency.cost.base_s == alone.cost.base_s / 2
    assert latency.copy_s(100) == alone.copy_s(100) / 2, "each stage copies its own layers"


@pytest.mark.parametrize("num_stages", [0, 2])
def test_stages_of_padded_batches_are_refused(num_stages: int) -> None:
    with pytest.raises(InvalidValueError, match="num_stages"):
        ReplicaShape(100, execution="static", num_stages=num_stages)
    with pytest.raises(InvalidValueError, match="kind: got 'Replica'"):
        FleetShape(ReplicaShape(100, num_stages=2), TWO_STAGES)


GPT_3 = Roofline(GPUS["a100-40g"], MODELS["gpt-3-175b"], tensor_parallel=8, pipeline_parallel=2)


def one_by_one(latency: LatencyModel, num_seqs: int, context: int, num_steps: int) -> float:
    return sum(latency.step_s(0, num_seqs, context + num_seqs * step) for step in range(num_steps))


@pytest.mark.parametrize("latency", [A100_7B, GPT_3], ids=["linear", "roofline"])
@pytest.mark.parametrize(("num_seqs", "context", "num_steps"), [(1, 1, 1), (7, 3000, 2), (64, 50_000, 300)])
def test_a_run_takes_what_its_steps_take(latency: LatencyModel, num_seqs: int, context: int, num_steps: int) -> None:
    expected = one_by_one(latency, num_seqs, context, num_steps)
    assert latency.decode_run_s(num_seqs, context, num_steps) == pytest.approx(expected)


def test_kv_and_its_copies_have_the_published_sizes() -> None:
    """FastServe: GPT-3 175B, prompt of 512 tokens and one generated: 2.25 GiB in fp16."""
    assert MODELS["gpt-3-175b"].kv_bytes * 513 == 2_420_637_696
    assert MODELS["llama-2-7b"].kv_bytes == A100_7B.kv_bytes == 512 * 1024
    assert A100_7B.copy_s(2000) == pytest.approx(0.0419, abs=1e-4)
    with pytest.raises(InvalidValueError, match="copy_bandwidth"):
        LinearLatency(StepCost(1, 0, 0, 0), copy_bandwidth=0)


def test_decoding_is_bound_by_memory_and_prefill_by_arithmetic() -> None:
    plain = Roofline(GPUS["a100-80g"], MODELS["llama-2-7b"], efficiency=1.0, overhead_s=0.0)
    assert plain.step_s(0, 1, 1) == pytest.approx(2 * 6.7e9 / 2.04e12, rel=1e-3)
    assert plain.step_s(4096, 0, 0) == pytest.approx(2 * 6.7e9 * 4096 / 312e12)
    whole = Roofline(GPUS["a100-80g"], MODELS["llama-2-7b"])
    assert whole.cost.step_s(0, 8, 8000) == pytest.approx(whole.step_s(0, 8, 8000), rel=1e-3), "its linear cost"


def test_tensor_parallel_shortens_steps_and_stages_make_disjoint_batches_of_them() -> None:
    single = Roofline(GPUS["a100-80g"], MODELS["opt-66b"], overhead_s=0.0)
    twice = dataclasses.replace(single, tensor_parallel=2)
    staged = dataclasses.replace(single, pipeline_parallel=2)
    assert twice.step_s(0, 8, 8000) == pytest.approx(single.step_s(0, 8, 8000) / 2)
    assert staged.step_s(0, 8, 8000) == single.step_s(0, 4, 4000)
    assert staged.copy_s(1000) == twice.copy_s(1000) == single.copy_s(1000) / 2


def test_a_token_is_multiplied_with_its_experts_and_a_large_step_reads_all() -> None:
    """Mixtral 8x7B: 12.9 of 46.7 billion parameters for one token."""
    model = MODELS["mixtral-8x7b"]
    assert model.active_params == model.read_params(1) == pytest.approx(12.9e9, rel=0.01)
    assert model.read_params(2) > model.active_params
    assert model.read_params(64) == pytest.approx(model.num_params)
    plain = Roofline(GPUS["a100-80g"], model, efficiency=1.0, overhead_s=0.0)
    assert plain.step_s(0, 1, 1) == pytest.approx(2 * model.active_params / 2.04e12, rel=1e-3)
    assert plain.step_s(4096, 0, 0) == pytest.approx(2 * model.active_params * 4096 / 312e12)
