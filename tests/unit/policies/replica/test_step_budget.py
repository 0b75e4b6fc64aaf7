"""Step budgets: prompts beside streams take what keeps the streams' gaps below the target, live and simulated."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.costs import StepCost, attention_pairs
from farsight.core.errors import ConfigError, InvalidValueError
from farsight.policies.compose import configured_scheduler
from farsight.policies.interfaces import Job
from farsight.policies.replica.planner import LEAST_TOKENS, UNBOUNDED, StepBudget
from farsight.policies.settings import PolicySettings
from farsight.simulator.cluster.records import Record
from farsight.simulator.cluster.replica import ReplicaShape
from farsight.simulator.traffic.workload import SimRequest
from tests.unit.policies.closed_loops import one_replica

COST = StepCost(base_s=0.010, prefill_token_s=0.1e-3, decode_seq_s=0.1e-3, context_token_s=1e-6)


def stream(name: str, prompt_len: int = 100) -> Job:
    return Job(name, 0.0, prompt_len, 100, output_len=5, computed_len=prompt_len + 4)


def prompt(computed_len: int = 0) -> Job:
    return Job("prompt", 0.0, 5000, 100, computed_len=computed_len)


def test_a_step_with_the_budget_lasts_as_long_as_the_target() -> None:
    jobs = [stream("a"), stream("b", 300), prompt()]
    num = StepBudget(0.1).prompt_tokens(jobs, COST)
    assert COST.step_s(num, 2, 410) <= 0.1 < COST.step_s(num + 1, 2, 410)


def test_prompts_that_cost_more_the_further_they_are_get_fewer_tokens() -> None:
    cost = replace(COST, prefill_pair_s=1e-7)
    for start in (0, 3000):
        num = StepBudget(0.1).prompt_tokens([stream("a"), prompt(start)], cost)
        assert cost.step_s(num, 1, 105, attention_pairs(num, start)) <= 0.1
        assert cost.step_s(num + 1, 1, 105, attention_pairs(num + 1, start)) > 0.1


def test_streams_that_miss_the_target_leave_prompts_as_much_time_as_they_take() -> None:
    jobs = [*(stream(str(number)) for number in range(200)), prompt()]
    num = StepBudget(0.02).prompt_tokens(jobs, COST)
    assert num * COST.prefill_token_s == pytest.approx(COST.step_s(0, 200, 200 * 105), rel=0.01)
    dear = replace(COST, prefill_token_s=10.0)
    assert StepBudget(0.02).prompt_tokens(jobs, dear) == LEAST_TOKENS


def test_there_is_no_budget_without_streams_prices_or_a_target() -> None:
    assert StepBudget(0.1).prompt_tokens([prompt()], COST) == UNBOUNDED
    assert StepBudget(0.1).prompt_tokens([stream("a")], None) == UNBOUNDED
    assert StepBudget().prompt_tokens([stream("a")], COST) == UNBOUNDED
    free = StepCost(0.01, 0.0, 0.0, 0.0)
    assert StepBudget(0.1).prompt_tokens([stream("a")], free) == UNBOUNDED
    with pytest.raises(InvalidValueError, match="max_gap_s"):
        StepBudget(0.0)


def test_a_server_takes_its_target_from_the_configuration() -> None:
    assert configured_scheduler(SchedulerConfig(max_gap_ms=0), 4).limits.budget.max_gap_s == math.inf
    assert configured_scheduler(SchedulerConfig(max_gap_ms=80), 4).limits.budget.max_gap_s == pytest.approx(0.08)
    with pytest.raises(ConfigError, match="max_gap_ms"):
        SchedulerConfig(max_gap_ms=-1.0)


def run(max_gap_s: float, preset: str) -> dict[str, Record]:
    """Two streams, and long prompts that come while these run."""
    shape = ReplicaShape(1000, 16, max_num_seqs=8, max_batch_tokens=2048)
    config = SchedulerConfig(max_gap_ms=1e3 * max_gap_s)
    settings = PolicySettings(config, cost=COST)
    fleet = one_replica(preset, settings, shape)
    streams = [SimRequest(f"stream{number}", 0.0, 50, 200, 300) for number in range(2)]
    prompts = [SimRequest(f"prompt{number}", 0.5 + 0.4 * number, 1800, 5, 300) for number in range(3)]
    return {record.arrival.request_id: record for record in fleet.run([*streams, *prompts]).done}


@pytest.mark.parametrize("preset", ["fcfs", "farsight"])
def test_a_stream_keeps_its_gaps_while_long_prompts_are_computed(preset: str) -> None:
    without, target_s = run(0.0, preset), 0.05
    within = run(target_s, preset)
    for name in ("stream0", "stream1"):
        assert without[name].max_gap_s > 0.18, "a prompt of 1,800 tokens takes as long"
        assert within[name].max_gap_s <= target_s + 1e-3  # a token between the plan and the step
    for name, record in within.items():
        assert record.num_tokens == record.arrival.output_len
        if name.startswith("prompt"):
            assert record.ttft_s > without[name].ttft_s, "what it costs"


def test_prompts_alone_are_computed_in_whole_steps() -> None:
    record = run(0.05, "fcfs")["stream0"]
    assert record.ttft_s == pytest.approx(COST.prefill_s(100))
