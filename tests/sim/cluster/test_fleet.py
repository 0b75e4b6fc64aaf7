"""The fleet: times that can be worked out by hand, and jumps that change nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest

from farsight.core.config.scheduling import PlacementConfig, SchedulerConfig
from farsight.core.costs import StepCost
from farsight.kvcache import LeaseExecutor
from farsight.policies.compose import build_router, build_scheduler
from farsight.policies.replica.scheduler import SchedulerLimits
from farsight.policies.settings import PolicySettings
from farsight.simulator.cluster.fleet import Fleet, FleetShape, Scaling
from farsight.simulator.cluster.latency import LinearLatency
from farsight.simulator.cluster.records import Record
from farsight.simulator.cluster.replica import ReplicaShape
from farsight.simulator.traffic.workload import SimRequest

PLAIN = LinearLatency(StepCost(base_s=1.0, prefill_token_s=0.1, decode_seq_s=0.0, context_token_s=0.0))


def fleet(
    shape: ReplicaShape,
    latency: LinearLatency = PLAIN,
    *,
    num_replicas: int = 1,
    clients: int | None = None,
    kv: str = "recompute-newest",
    scaling: Scaling | None = None,
    recall: bool = False,
) -> Fleet:
    whole = FleetShape(shape, latency, num_replicas, scaling=scaling)
    limits = SchedulerLimits(shape.max_num_seqs, standby_slots=0)
    placement = PlacementConfig(recall=recall)
    settings = PolicySettings(SchedulerConfig(watermark=1.0, max_gap_ms=0.0), placement=placement)
    router = build_router("fcfs", settings=settings, places=shape.max_num_seqs)
    return Fleet(whole, router, lambda _: build_scheduler("fcfs", limits, settings, kv=kv), clients=clients)


def by_id(records: list[Record]) -> dict[str, Record]:
    return {record.arrival.request_id: record for record in records}


def test_one_request_takes_its_prefill_and_its_decodes() -> None:
    recorder = fleet(ReplicaShape(100)).run([SimRequest("a", 2.0, 5, 4, 10)])
    (record,) = recorder.done
    assert (record.first_token_at, record.finished_at) == (3.5, 6.5)
    assert (record.ttft_s, record.jct_s, record.tpot_s, record.max_gap_s) == (1.5, 4.5, 1.0, 1.0)
    assert recorder.usage["0"].num_steps == 4


def test_who_arrives_in_a_step_begins_with_the_next_one() -> None:
    arrivals = [SimRequest("a", 0.0, 2, 5, 10), SimRequest("b", 2.3, 10, 2, 10)]
    records = by_id(fleet(ReplicaShape(100)).run(arrivals).done)
    # a: 1.2, 2.2, 3.2, then a step with the 10 prompt tokens of b: 5.2, then 6.2
    assert records["b"].first_token_at == pytest.approx(5.2)
    assert records["a"].finished_at == pytest.approx(6.2)
    assert records["a"].max_gap_s == pytest.approx(2.0)
    assert records["b"].finished_at == pytest.approx(6.2)


def test_the_newest_is_evicted_when_memory_runs_out_and_computed_again() -> None:
    """12 tokens: a (4+6) and b (4+6) fit until each has 2 of its 6 tokens."""
    arrivals = [SimRequest("a", 0.0, 4, 6, 6), SimRequest("b", 0.0, 4, 6, 6)]
    recorder = fleet(ReplicaShape(12, block_size=1)).run(arrivals)
    records = by_id(recorder.done)
    assert (records["a"].num_evictions, records["b"].num_evictions) == (0, 1)
    # Steps 1 to 3 together: 1.8, 2.8, 3.8 (positions 0 to 5 of each computed); a alone: 4.8, 5.8, 6.8
    assert records["a"].finished_at == pytest.approx(6.8)
    # b again: 7 known tokens in one step, 8.5, then two more
    assert records["b"].finished_at == pytest.approx(10.5)


def test_a_swapped_request_waits_for_its_copies_and_computes_nothing_twice() -> None:
    """As before, but b moves: 6 tokens at 10 a second each way, and a needs the room that the copy frees."""
    latency = LinearLatency(PLAIN.cost, kv_bytes=1, copy_bandwidth=10)
    shape = ReplicaShape(12, block_size=1, num_host_blocks=20)
    swaps = fleet(shape, latency, kv="swap-newest")
    records = by_id(swaps.run([SimRequest("a", 0.0, 4, 6, 6), SimRequest("b", 0.0, 4, 6, 6)]).done)
    assert (records["b"].num_evictions, records["b"].num_swaps) == (0, 1)
    assert records["a"].finished_at == pytest.approx(3.8 + 0.6 + 3)
    assert records["b"].finished_at == pytest.approx(3.8 + 0.6 + 3 + 0.6 + 3)


@pytest.mark.parametrize(("copies_block", "ends_at"), [(False, 7.4 + 1.2), (True, 7.4 + 0.6 + 1.2)])
def test_a_step_waits_for_copies_only_where_nothing_overlaps(copies_block: bool, ends_at: float) -> None:
    """As before; c comes while a computes its last token, and b's KV comes back from 7.4 to 8.0."""
    latency = LinearLatency(PLAIN.cost, kv_bytes=1, copy_bandwidth=10)
    shape = ReplicaShape(12, block_size=1, num_host_blocks=20, copies_block=copies_block)
    arrivals = [SimRequest("a", 0.0, 4, 6, 6), SimRequest("b", 0.0, 4, 6, 6), SimRequest("c", 7.0, 2, 1, 1)]
    records = by_id(fleet(shape, latency, kv="swap-newest").run(arrivals).done)
    assert records["a"].finished_at == pytest.approx(7.4)
    assert records["c"].finished_at == pytest.approx(ends_at)


def test_with_one_place_or_client_requests_follow_each_other() -> None:
    one_place = fleet(ReplicaShape(100, max_num_seqs=1)).run([SimRequest(name, 0.0, 10, 3, 10) for name in "abc"])
    assert [record.finished_at for record in one_place.done] == pytest.approx([4.0, 8.0, 12.0])
    arrivals = [SimRequest(f"r{i}", 0.0, 10, 3, 10) for i in range(4)]
    records = by_id(fleet(ReplicaShape(100), clients=1).run(arrivals).done)
    assert [records[f"r{i}"].arrival.arrived_at for i in range(4)] == pytest.approx([0.0, 4.0, 8.0, 12.0])


def lives(seed: int) -> list[tuple[str, str, float, float, float, int]]:
    """A crowded fleet of two replicas, prefixes shared."""
    rng = np.random.default_rng(seed)
    arrivals, at = [], 0.0
    for i in range(120):
        at += float(rng.exponential(0.4))
        prefix = tuple(range(int(rng.integers(0, 4))))
        arrivals.append(SimRequest(f"r{i}", at, int(rng.integers(12, 40)), int(rng.integers(1, 60)), 60, prefix))
    latency = LinearLatency(StepCost(0.01, 0.001, 0.002, 0.0001))
    shape = ReplicaShape(40, block_size=4, max_num_seqs=6, max_batch_tokens=32, shares_prefixes=bool(seed % 2))
    recorder = fleet(shape, latency, num_replicas=2).run(arrivals)
    assert len(recorder.done) == 120
    assert all(math.isfinite(record.finished_at) for record in recorder.done)
    return sorted(
        (r.arrival.request_id, r.replica, r.first_token_at, r.finished_at, r.max_gap_s, r.num_evictions)
        for r in recorder.done
    )


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(2, 20))])
def test_steps_taken_at_once_change_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = lives(seed)
    monkeypatch.setattr(LeaseExecutor, "horizon", lambda self, batch, most: 1)
    one_by_one = lives(seed)
    for fast, slow in zip(at_once, one_by_one, strict=True):
        assert fast[:2] == slow[:2]
        assert fast[2:] == pytest.approx(slow[2:])


def test_replicas_follow_the_predicted_delay_and_no_request_is_lost_on_the_way() -> None:
    scaling = Scaling(1, 4, target_queue_delay_s=1.0, scale_down_after_s=20.0, places=2, start_s=5.0)
    # A replica ends one such request a second; first three or four come each second, then one every 10 s.
    many = [SimRequest(f"m{number}", 0.3 * number, 10, 20, 20) for number in range(200)]
    few = [SimRequest(f"f{number}", 100.0 + 10 * number, 10, 2, 2) for number in range(20)]
    shape, latency = ReplicaShape(100, max_num_seqs=2), LinearLatency(StepCost(0.1, 0.0, 0.0, 0.0))
    runs = [fleet(shape, latency, scaling=each) for each in (scaling, None)]
    records = [by_id(each.run([*many, *few]).done) for each in runs]
    assert records[0].keys() == records[1].keys() == {each.request_id for each in (*many, *few)}
    assert {each.replica for each in records[0].values()} == {"0", "1", "2", "3"}
    early = [each for name, each in records[0].items() if name[0] == "m" and each.replica != "0"]
    assert min(each.first_token_at for each in early) >= 5.0, "a replica takes requests once it has started"
    assert max(each.finished_at for each in records[0].values()) < 300.0
    assert {records[0][f"f{number}"].replica for number in range(10, 20)} == {"0"}, "the others have gone"
    assert 500 < runs[0].replica_s < 700, "three more for a minute, one fewer each 20 s, one for 291 s"
    assert runs[1].replica_s == runs[1].now
    assert sum(each.jct_s for each in records[0].values()) < 0.7 * sum(each.jct_s for each in records[1].values())


def test_what_waits_moves_to_a_replica_that_has_come_up() -> None:
    scaling = Scaling(1, 2, target_queue_delay_s=1.0, scale_down_after_s=1e9, places=2, start_s=5.0)
    burst = [SimRequest(f"m{number}", 0.0, 10, 20, 20) for number in range(20)]
    shape, latency = ReplicaShape(100, max_num_seqs=2), LinearLatency(StepCost(0.1, 0.0, 0.0, 0.0))
    runs = [fleet(shape, latency, scaling=scaling, recall=recall) for recall in (False, True)]
    records = [by_id(each.run(burst).done) for each in runs]
    assert [len(each) for each in records] == [20, 20]
    assert {each.replica for each in records[0].values()} == {"0"}, "what was placed stays"
    moved = [each for each in records[1].values() if each.replica == "1"]
    assert len(moved) == runs[1].num_recalled == 6, "of ten pairs, each of which takes two seconds, half ran before"
    assert min(each.first_token_at for each in moved) == pytest.approx(9.1), "the second replica is up after 9 s"
    assert runs[1].now < 0.8 * runs[0].now
