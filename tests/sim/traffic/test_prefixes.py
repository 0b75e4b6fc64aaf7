"""Prefix workloads: lengths, shared parts and names of blocks."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from farsight.core.errors import InvalidValueError
from farsight.simulator.traffic.prefixes import (
    AGENT,
    LAWS,
    LONG_DOCUMENT,
    PROGRAMMING,
    TOOL_USE,
    VIDEO_QA,
    BlockNames,
    PrefixLaw,
    mooncake_blocks,
    prefix_workload,
    real_prefixes,
)
from farsight.simulator.traffic.traces import TraceError, count_tokens
from farsight.simulator.traffic.workload import SimRequest
from farsight.simulator.traffic.workloads import WORKLOADS, build_workload

BLOCK = 16


def _run(law: PrefixLaw, num: int = 2000, prefixes: int = 50, seed: int = 1, block: int = BLOCK) -> list[SimRequest]:
    return prefix_workload(np.random.default_rng(seed), list(range(num)), law, prefixes, block, popularity=0.0)


def test_laws_hold_the_published_means() -> None:
    assert [(x.prompt, x.output, x.shared) for x in (TOOL_USE, AGENT, PROGRAMMING, VIDEO_QA, LONG_DOCUMENT)] == [
        (1835, 43, 0.85),
        (2285, 16, 0.97),
        (3871, 190, 0.97),
        (9865, 4, 0.88),
        (23474, 16, 0.91),
    ]
    assert all(sum(level.share for level in law.levels) == pytest.approx(1) for law in LAWS.values())


@pytest.mark.parametrize("law", LAWS.values(), ids=list(LAWS))
def test_means_follow_the_law(law: PrefixLaw) -> None:
    arrivals = _run(law, prefixes=400, block=4096)
    prompts = np.array([a.prompt_len for a in arrivals])
    assert prompts.mean() == pytest.approx(law.prompt, rel=0.06)
    assert np.mean([a.output_len for a in arrivals]) == pytest.approx(law.output, rel=0.15)
    assert all(a.output_len <= a.max_new_tokens for a in arrivals)


@pytest.mark.parametrize("law", LAWS.values(), ids=list(LAWS))
def test_the_shared_part_is_what_a_large_enough_cache_finds(law: PrefixLaw) -> None:
    seen: set[int] = set()
    found = total = 0
    for arrival in _run(law, num=1000, prefixes=5):
        found += BLOCK * sum(name in seen for name in arrival.prefix)
        total += arrival.prompt_len
        seen.update(arrival.prefix)
    assert found / total == pytest.approx(law.shared, abs=0.05)


@pytest.mark.parametrize("law", LAWS.values(), ids=list(LAWS))
def test_a_name_stands_for_one_place_in_the_tree(law: PrefixLaw) -> None:
    """Each name has one name before it; so, by induction, one way leads to it."""
    before: dict[int, int] = {}
    for arrival in _run(law, num=200):
        assert BLOCK * len(arrival.prefix) <= arrival.prompt_len
        for earlier, name in pairwise((-1, *arrival.prefix)):
            assert before.setdefault(name, earlier) == earlier


def test_tools_share_the_system_prompt_and_no_more() -> None:
    prefixes = sorted({a.prefix for a in _run(TOOL_USE)})
    common = set.intersection(*(set(p) for p in prefixes))
    assert len(prefixes) == 50
    assert len(common) == int(1835 * 0.85 * 0.1) // BLOCK


def test_turns_of_a_conversation_extend_each_other_and_then_a_new_one_begins() -> None:
    arrivals = _run(AGENT, num=3 * AGENT.turns, prefixes=1)
    start = 1 + next(i for i in range(AGENT.turns) if arrivals[i + 1].prompt_len < arrivals[i].prompt_len)
    one, two = arrivals[start : start + AGENT.turns], arrivals[start + AGENT.turns :]
    for earlier, later in pairwise(one):
        assert later.prompt_len > earlier.prompt_len
        assert later.prefix[: len(earlier.prefix)] == earlier.prefix
    assert two[0].prompt_len == one[0].prompt_len
    shared = set(one[-1].prefix) & set(two[-1].prefix)
    assert 0 < len(shared) <= len(one[0].prefix)
    assert shared == set(one[0].prefix[: len(shared)])


def test_popularity_follows_the_zipf_law() -> None:
    rng = np.random.default_rng(4)
    arrivals = prefix_workload(rng, [0.0] * 20_000, VIDEO_QA, 10, 4096, popularity=1.1)
    counts = sorted(Counter(a.prefix[:1] for a in arrivals if a.prefix).values(), reverse=True)
    assert counts[0] / counts[1] == pytest.approx(2**1.1, rel=0.1)
    assert _run(TOOL_USE, 100) == _run(TOOL_USE, 100) != _run(TOOL_USE, 100, seed=2)
    with pytest.raises(InvalidValueError, match="longest"):
        _run(TOOL_USE, prefixes=0)


def test_blocks_over_two_nodes_belong_to_the_deeper_one() -> None:
    names = BlockNames(4)
    assert names.along([("root", 6), ("left", 6)]) == (0, 1, 2)
    assert names.along([("root", 6), ("right", 5)]) == (0, 3)
    with pytest.raises(InvalidValueError, match="block_size"):
        BlockNames(0)


def test_mooncake_names_are_split_and_partial_blocks_dropped() -> None:
    arrival = SimRequest("m", 0.0, 512 + 300, 1, 1, prefix=(0, 7))
    assert mooncake_blocks([arrival])[0].prefix == (0,)
    assert mooncake_blocks([arrival], 256)[0].prefix == (0, 1, 14)
    for bad in (0, 100, 1024):
        with pytest.raises(InvalidValueError, match="block_size"):
            mooncake_blocks([arrival], bad)


def _groups(folder: Path) -> Path:
    tools = [
        {
            "workload": "toolbench",
            "prefix_id": f"t{i}",
            "prefix": "word " * (40 + 10 * i),
            "requests": [{"id": "q", "input": "what is it ?", "output": None}],
        }
        for i in range(3)
    ]
    agent = {
        "workload": "alfworld",
        "prefix_id": "a",
        "prefix": "word " * 100,
        "turns": [["look around >", " go to shelf"], ["you are there >", " take cup"]],
        "tail": "",
    }
    path = folder / "prefix_groups.jsonl"
    path.write_text("".join(json.dumps(x) + "\n" for x in [*tools, agent]))
    return path


def test_real_prefixes_are_shared_within_their_group(tmp_path: Path) -> None:
    arrivals = real_prefixes(np.random.default_rng(0), [0.0] * 200, _groups(tmp_path), "toolbench", 8)
    own = count_tokens("what is it ?")
    by_length = {a.prompt_len: a.prefix for a in arrivals}
    assert sorted(by_length) == [count_tokens("word " * n) + own for n in (40, 50, 60)]
    assert all(by_length[a.prompt_len] == a.prefix for a in arrivals)
    assert all(len(p) == (length - own) // 8 for length, p in by_length.items())
    assert not set.intersection(*(set(p) for p in by_length.values()))
    with pytest.raises(InvalidValueError, match="kind"):
        real_prefixes(np.random.default_rng(0), [0.0], _groups(tmp_path), "tools", 8)


def test_real_turns_share_their_whole_prompt(tmp_path: Path) -> None:
    arrivals = real_prefixes(np.random.default_rng(0), [0.0] * 50, _groups(tmp_path), "alfworld", 4)
    first, second = sorted({(a.prompt_len, a.output_len, a.prefix) for a in arrivals})
    assert (first[0], second[0]) == (130 + 4, 134 + 4 + 6)
    assert first[1] == count_tokens(" go to shelf")
    assert second[2][: len(first[2])] == first[2]
    assert len(second[2]) == second[0] // 4


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"requests": [{"input": "x"}]}, "requests is not a list of objects with input and output"),
        ({"requests": []}, "a prefix without requests"),
        ({"turns": [["x"]]}, "turns is not a list of"),
        ({}, "missing column requests"),
    ],
)
def test_bad_groups_are_told_their_line(tmp_path: Path, fields: dict[str, object], reason: str) -> None:
    path = tmp_path / "groups"
    path.write_text(json.dumps({"workload": "w", "prefix_id": "p", "prefix": "x", **fields}) + "\n")
    with pytest.raises(TraceError, match=f"groups:1: {reason}"):
        real_prefixes(np.random.default_rng(0), [0.0], path, "w", 8)


DRAWN = ["d1", "d2", "d3", "gsm8k-like", "sharegpt-like", "zipf", *LAWS]


@pytest.mark.parametrize("name", DRAWN)
def test_named_workloads_are_ordered_and_repeat(name: str) -> None:
    one, two = (build_workload(name, np.random.default_rng(6), 40, 5.0) for _ in range(2))
    assert one == two
    assert len({a.request_id for a in one}) == 40
    assert [a.arrived_at for a in one] == sorted(a.arrived_at for a in one)
    assert all(1 <= a.output_len <= a.max_new_tokens for a in one)
    assert {a.arrived_at for a in build_workload(name, np.random.default_rng(6), 3)} == {0.0}


def test_a_named_trace_is_debatched_rescaled_and_cut(tmp_path: Path) -> None:
    line = {"input_tokens": 40, "output_tokens": 3, "hash_ids": [5]}
    instants = [3, 3, 6, 6, 9]
    rows = "".join(json.dumps({"arrival_s": at, **line}) + "\n" for at in instants)
    (tmp_path / "mooncake_conversation.jsonl.gz").write_text(rows)
    own = build_workload("mooncake", np.random.default_rng(0), 4, None, tmp_path)
    assert [a.arrived_at for a in own] == [0, 1.5, 3, 4.5]
    assert own[0].prefix == (160, 161)
    fast = build_workload("mooncake", np.random.default_rng(0), 4, 2.0, tmp_path)
    assert [a.arrived_at for a in fast] == [0, 0.5, 1, 1.5]
    for name, num_requests, wrong in (
        ("mooncake", 6, "num_requests"),
        ("d4", 1, "workload"),
        ("d1", 0, "num_requests"),
    ):
        with pytest.raises(InvalidValueError, match=wrong):
            build_workload(name, np.random.default_rng(0), num_requests, None, tmp_path)
    assert set(DRAWN) < set(WORKLOADS)
