"""The live prefix benchmark: prompts that share what their names say, its systems, and one run on live components."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.live_prefixes import setups
from benchmarks.live_prefixes.__main__ import CLAIMS, STUDY
from benchmarks.live_prefixes.setups import BLOCK, SYSTEMS, PrefixSetup
from benchmarks.live_presets.live import prompt_ids
from benchmarks.live_presets.runs import Run, Store, figures, measure
from benchmarks.live_presets.study import Study
from farsight.kvcache.block_manager import hash_blocks
from farsight.simulator.traffic.arrivals import Poisson
from farsight.simulator.traffic.prefixes import TOOL_USE, prefix_workload
from farsight.simulator.traffic.workload import SimRequest


def draw(rng: np.random.Generator, num_requests: int) -> list[SimRequest]:
    return prefix_workload(rng, Poisson(1.0).sample(rng, num_requests).tolist(), TOOL_USE, 6, BLOCK)


SMALL = PrefixSetup(draw, num_replicas=2, rate=20.0, num_requests=24, num_leading=2)


def test_prompts_have_in_common_what_their_blocks_say() -> None:
    one, other = SimRequest("a", 0.0, 100, 1, 1, (7, 8)), SimRequest("b", 0.0, 110, 1, 1, (7, 9))
    alone = SimRequest("c", 0.0, 50, 1, 1)
    prompts = [prompt_ids(each, 32) for each in (one, other, alone)]
    assert [len(prompt) for prompt in prompts] == [100, 110, 50]
    assert prompts[0][:32] == prompts[1][:32]
    hashes = [hash_blocks(prompt, 32) for prompt in prompts]
    assert hashes[0][0] == hashes[1][0] and not set(hashes[0][1:]) & set(hashes[1][1:])
    assert prompts[0] == prompt_ids(one, 32), "the same in every run"


def test_requests_come_at_the_rate_and_in_order_whatever_the_seed() -> None:
    arrivals = SMALL.arrivals(3)
    instants = [each.arrived_at for each in arrivals]
    assert instants == sorted(instants) and instants[0] == 0
    assert (len(arrivals) - 1) / instants[-1] == pytest.approx(20.0, rel=0.1)
    assert arrivals == SMALL.arrivals(3) != SMALL.arrivals(4)
    assert all(each.forecast is not None for each in arrivals)


def _turn(conversation: int, turn: int) -> SimRequest:
    return SimRequest(f"{conversation}-{turn}", 10.0 * turn + conversation, 70, 1, 1, (0, conversation))


def test_mooncakes_conversations_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [[_turn(name, turn) for turn in range(3)] for name in (1, 2, 3)]
    monkeypatch.setattr(setups, "_conversations", lambda: found)
    drawn = setups.mooncake(np.random.default_rng(1), 6)
    assert [each.arrived_at for each in drawn] == sorted(each.arrived_at for each in drawn)
    assert sorted(each.prefix[1] for each in drawn) in ([1, 1, 1, 2, 2, 2], [1, 1, 1, 3, 3, 3], [2, 2, 2, 3, 3, 3])


def test_every_claim_names_what_there_is_and_every_system_can_be_simulated() -> None:
    assert len({claim.name for claim in CLAIMS}) == len(CLAIMS)
    arrivals = SMALL.arrivals(1)
    hit_rates = {}
    for name, system in SYSTEMS.items():
        assert system.predict is not None
        records = system.predict(SMALL, arrivals)
        assert len(records) == len(arrivals)
        hit_rates[name] = figures(records, SMALL.sla, 0.0, SMALL.num_warmup).hit_rate
    first = figures(SYSTEMS["round-robin"].predict(SMALL, arrivals), SMALL.sla, 0.0)  # type: ignore[misc]
    assert first.hit_rate < hit_rates["round-robin"], "the first requests do not count: caches were empty"
    for claim in CLAIMS:
        assert claim.setup in STUDY.setups and set(claim.systems) <= SYSTEMS.keys()
    assert 0.5 < hit_rates["round-robin"] < hit_rates["preble"] < 1
    assert hit_rates["farsight-mean"] == pytest.approx(hit_rates["oracle partition"], abs=0.1)


def test_live_the_same_is_cached_as_in_the_simulator(tmp_path: Path) -> None:
    study = Study("", CLAIMS, {"small": SMALL}, SYSTEMS, tmp_path / "none")
    runs = [Run("small", name, 1, 24, 4.0, live) for name in ("preble", "farsight-mean") for live in (True, False)]
    path = tmp_path / "runs.jsonl"
    measure(study, path, runs)
    store = Store(path)
    for run in runs:
        found = store.get(run)
        assert found is not None and not found.refused and found.jct_s > 0
        assert found.hit_rate > 0.6
