"""What no policy can work with is refused by the name of the parameter."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from farsight.core.config.scheduling import PlacementConfig, SchedulerConfig
from farsight.core.errors import InvalidValueError
from farsight.policies.admission.conservative import Conservative
from farsight.policies.admission.past_future import PastFuture, TrueLengths
from farsight.policies.admission.watermark import Aggressive
from farsight.policies.batching.base import first_arrived
from farsight.policies.batching.fcfs import FcfsBatches, vanilla_batch_size
from farsight.policies.batching.multi_bin import MultiBinBatcher, exponential_edges, sample_edges, uniform_edges
from farsight.policies.batching.wma import WmaBatcher
from farsight.policies.kv.cheapest_victim import CheapestVictim
from farsight.policies.kv.enst_offload import EnstOffload
from farsight.policies.lengths.history import LengthHistory
from farsight.policies.lengths.law import PredictorGate
from farsight.policies.order.boosted import Boosted
from farsight.policies.order.gittins import DecodePrice, Gittins
from farsight.policies.order.hit_groups import HitGroups
from farsight.policies.placement.e2 import E2Router
from farsight.policies.placement.e2_forecast import E2Forecast
from farsight.policies.replica.planner import StepBudget
from farsight.policies.settings import MlfqRules
from lab.reproduce.preble.runs import OraclePartition
from tests.unit.policies.e2_driver import LINEAR
from tests.unit.policies.mlfq_server import UNIT_COST, unit_mlfq

PRICE = DecodePrice(UNIT_COST, 64, 10_000)


def bad(make: Callable[..., object], **values: tuple[float, ...]) -> list[tuple[Callable[..., object], str, Any]]:
    return [(make, name, value) for name, each in values.items() for value in each]


CASES = [
    *bad(Aggressive, watermark=(0.0, 1.01, -1.0)),
    *bad(Conservative, overcommit=(0.0, -1.0, math.nan)),
    *bad(partial(PastFuture, TrueLengths()), reserve_ratio=(1.0, -0.1), max_lists=(0,)),
    *bad(FcfsBatches, size=(0,)),
    *bad(partial(vanilla_batch_size, 1, 1, max_new_tokens=0), max_prompt_len=(0,)),
    *bad(partial(vanilla_batch_size, max_prompt_len=1, max_new_tokens=1, token_bytes=1), memory_bytes=(0,)),
    *bad(partial(vanilla_batch_size, 1, max_prompt_len=1, max_new_tokens=1), token_bytes=(-1,)),
    *bad(partial(vanilla_batch_size, 1, 1, 1, 1), delta_factor=(0,)),
    *bad(partial(MultiBinBatcher, (1, 2)), batch_size=(0,)),
    *bad(partial(MultiBinBatcher, (1, 2), 2), max_wait_s=(-1, math.nan)),
    *bad(partial(WmaBatcher, choose=first_arrived), memory_tokens=(0, math.nan)),
    *bad(partial(WmaBatcher, 1, first_arrived), wma_threshold=(-1,), max_batch_size=(0,)),
    *bad(partial(EnstOffload, unit_mlfq()), min_idle_slots=(-1,), num_burst_levels=(-1,), lookahead=(-1,)),
    *bad(partial(CheapestVictim, Gittins(PRICE)), min_swap_len=(-1,), min_host_share=(1.5,)),
    *bad(LengthHistory, window=(0,)),
    *bad(PredictorGate, min_completions=(0,), window=(10,)),
    *bad(partial(Boosted, PRICE), tail=(0.0, math.inf), max_boost_s=(0.0,), theta=(0.5,), max_pause_s=(-1.0,)),
    *bad(partial(Gittins, PRICE), theta=(0.5,), gamma=(-1.0,)),
    *bad(partial(DecodePrice, UNIT_COST, capacity=1), max_num_seqs=(0,)),
    *bad(partial(DecodePrice, UNIT_COST, 1), capacity=(0,)),
    *bad(partial(HitGroups, num_slots=5), num_slots=(0,), num_groups=(0,)),
    *bad(MlfqRules, starve_check_every=(0,), max_prompt_tokens=(0,)),
    *bad(SchedulerConfig, quantum_s=(0.0, math.nan), starve_limit_s=(0.0, math.nan)),
    *bad(PlacementConfig, window_s=(0.0,), imbalance_ratio=(0.0, 1.1), balanced_ratio=(-0.1,), max_tree_mib=(0,)),
    *bad(PlacementConfig, rebalance_ratio=(0.9,), rebalance_after=(-1,), initial_output_len=(-1.0,)),
    *bad(partial(E2Router, LINEAR), block_size=(0,)),
    *bad(partial(E2Forecast, UNIT_COST), block_size=(0,)),
    *bad(partial(OraclePartition, {}, num_replicas=1, block_size=1), num_replicas=(0,), block_size=(0,)),
    *bad(StepBudget, max_gap_s=(0.0,)),
    *bad(SchedulerConfig, quantum_ratio=(1.0,), num_levels=(-1,), min_idle_slots=(-1,), num_burst_levels=(-1,)),
    *bad(SchedulerConfig, reserve_ratio=(1.0,), history_window=(0,), overcommit=(0.5,), max_gap_ms=(-1.0,)),
    (partial(MultiBinBatcher, batch_size=2), "edges", (1,)),
    (partial(MultiBinBatcher, batch_size=2), "edges", (1, 3, 2)),
    (partial(MultiBinBatcher, batch_size=2), "edges", (1, math.nan, 2)),
    (partial(DecodePrice, UNIT_COST, 1, 1), "unit", "tokens"),
]


@pytest.mark.parametrize(("make", "name", "value"), CASES)
def test_a_parameter_out_of_range_is_refused_by_its_name(make: Callable[..., object], name: str, value: Any) -> None:
    with pytest.raises(InvalidValueError) as raised:
        make(**{name: value})
    assert raised.value.field.rpartition(".")[2] == name


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("length", lambda: LengthHistory(initial=[-1])),
        ("history", lambda: LengthHistory().quantiles(np.array([0.5]))),
        ("high", lambda: uniform_edges(2, 1, 1)),
        ("num_bins", lambda: uniform_edges(1, 2, 0)),
        ("rate", lambda: exponential_edges(0, 2, 2)),
        ("batch_size", lambda: exponential_edges(1, 0, 2)),
        ("num_bins", lambda: exponential_edges(1, 2, 0)),
        ("lengths", lambda: sample_edges([], 2)),
    ],
)
def test_nothing_is_worked_out_from_what_says_nothing(field: str, make: Callable[[], object]) -> None:
    with pytest.raises(InvalidValueError, match=field):
        make()
