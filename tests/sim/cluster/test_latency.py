"""Step and copy times of simulated hardware."""

from __future__ import annotations

import dataclasses

import pytest

from core.costs import StepCost
from core.errors import InvalidValueError
from simulator.cluster.latency import A100_7B, GPUS, MODELS, LatencyModel, LinearLatency, Roofline

GPT_3 = Roofline(GPUS["a100-40g"], MODELS["gpt-3-175b"], tensor_parallel=8, pipeline_parallel=2)


def one_by_one(latency: LatencyModel, num_seqs: int, context: int, num_steps: int) -> float:
    return sum(latency.step_s(0, num_seqs, context + num_seqs * step) for step in range(num_steps))


@pytest.mark.parametrize("latency", [A100_7B, GPT_3], ids=["linear", "roofline"])
@pytest.mark.parametrize(("num_seqs", "context", "num_steps"), [(1, 1, 1), (7, 3000, 2), (64, 50_000, 300)])
def test_a_run_takes_what_its_steps_take(latency: LatencyModel, num_seqs: int, context: int, num_steps: int) -> None:
    expected = one_by_one(latency, num_seqs, context, num_steps)
    assert latency.decode_run_s(num_seqs, context, num_steps) == pytest.approx(expected)


def test_kv_of_the_example_of_fastserve() -> None:
    """GPT-3 175B, prompt of 512 tokens and one generated: 2.25 GiB in fp16."""
    assert MODELS["gpt-3-175b"].kv_bytes * 513 == 2_420_637_696


def test_a_swap_of_2000_tokens_of_llama_2_7b_takes_42_ms() -> None:
    assert MODELS["llama-2-7b"].kv_bytes == A100_7B.kv_bytes == 512 * 1024
    assert A100_7B.copy_s(2000) == pytest.approx(0.0419, abs=1e-4)


def test_decoding_is_bound_by_memory_and_prefill_by_arithmetic() -> None:
    plain = Roofline(GPUS["a100-80g"], MODELS["llama-2-7b"], efficiency=1.0, overhead_s=0.0)
    assert plain.step_s(0, 1, 1) == pytest.approx(2 * 6.7e9 / 2.04e12, rel=1e-3)
    assert plain.step_s(4096, 0, 0) == pytest.approx(2 * 6.7e9 * 4096 / 312e12)


def test_tensor_parallel_shortens_steps_and_stages_make_disjoint_batches_of_them() -> None:
    single = Roofline(GPUS["a100-80g"], MODELS["opt-66b"], overhead_s=0.0)
    twice = dataclasses.replace(single, tensor_parallel=2)
    staged = dataclasses.replace(single, pipeline_parallel=2)
    assert twice.step_s(0, 8, 8000) == pytest.approx(single.step_s(0, 8, 8000) / 2)
    assert staged.step_s(0, 8, 8000) == single.step_s(0, 4, 4000)
    assert staged.copy_s(1000) == twice.copy_s(1000) == single.copy_s(1000) / 2


def test_the_linear_cost_of_a_roofline_is_its_own_where_memory_binds() -> None:
    plain = Roofline(GPUS["a100-80g"], MODELS["llama-2-7b"])
    assert plain.cost.step_s(0, 8, 8000) == pytest.approx(plain.step_s(0, 8, 8000), rel=1e-3)


def test_a_link_needs_a_bandwidth() -> None:
    with pytest.raises(InvalidValueError, match="copy_bandwidth"):
        LinearLatency(StepCost(1, 0, 0, 0), copy_bandwidth=0)


def test_a_token_is_multiplied_with_its_experts_and_a_large_step_reads_all() -> None:
    """Mixtral 8x7B: 12.9 of 46.7 billion parameters for one token."""
    model = MODELS["mixtral-8x7b"]
    assert model.active_params == model.read_params(1) == pytest.approx(12.9e9, rel=0.01)
    assert model.read_params(2) > model.active_params
    assert model.read_params(64) == pytest.approx(model.num_params)
    plain = Roofline(GPUS["a100-80g"], model, efficiency=1.0, overhead_s=0.0)
    assert plain.step_s(0, 1, 1) == pytest.approx(2 * model.active_params / 2.04e12, rel=1e-3)
    assert plain.step_s(4096, 0, 0) == pytest.approx(2 * model.active_params * 4096 / 312e12)
