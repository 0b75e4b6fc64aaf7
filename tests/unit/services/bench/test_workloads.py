"""What is sent, and when in an open loop: seeded workloads; traces, texts and prefix groups from files."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import statistics
from collections import Counter
from pathlib import Path

import pytest

from farsight.core.errors import InvalidValueError
from farsight.services.bench.datasets import estimated_tokens, open_lines, parse_prefix_groups, parse_texts, parse_trace
from farsight.services.bench.requests import FIRST_ID, BenchRequest, PromptPart, clipped
from farsight.services.bench.workloads import (
    LONG_LENS,
    LONG_PERIOD,
    OUTPUT_LENS,
    PROMPT_LENS,
    SHORT_LENS,
    WORKLOADS,
    ZIPF_OUTPUT_LENS,
    ZIPF_PROMPT_LENS,
    ZipfRanks,
    drawn_arrivals,
    make_workload,
    replayed_arrivals,
)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_gives_one_workload(name: str) -> None:
    requests = make_workload(name, 50, seed=7)
    assert requests == make_workload(name, 50, seed=7)
    assert requests != make_workload(name, 50, seed=8)
    assert [request.id for request in requests] == list(range(50))


def test_uniform_lengths() -> None:
    requests = make_workload("uniform", 2000, seed=1)
    lens = [request.output_tokens for request in requests]
    assert (min(lens), max(lens)) == OUTPUT_LENS
    assert statistics.fmean(lens) == pytest.approx(sum(OUTPUT_LENS) / 2, rel=0.05)
    assert all(PROMPT_LENS[0] <= request.prompt_tokens <= PROMPT_LENS[1] for request in requests)


def test_skewed_lengths() -> None:
    lens = [request.output_tokens for request in make_workload("skewed", 2000, seed=1)]
    assert OUTPUT_LENS[0] <= min(lens) and max(lens) <= OUTPUT_LENS[1]
    assert statistics.median(lens) == pytest.approx(28, abs=2)
    assert statistics.fmean(lens) > 1.3 * statistics.median(lens)


def test_hol_has_one_long_output_in_every_period() -> None:
    requests = make_workload("hol", 10 * LONG_PERIOD, seed=3)
    for start in range(0, len(requests), LONG_PERIOD):
        kinds = Counter(request.kind for request in requests[start : start + LONG_PERIOD])
        assert kinds == {"long": 1, "short": LONG_PERIOD - 1}
    for request in requests:
        low, high = LONG_LENS if request.kind == "long" else SHORT_LENS
        assert low <= request.output_tokens <= high


def test_hol_burst_is_hol_with_the_long_ones_first() -> None:
    burst, spread = make_workload("hol-burst", 60, seed=3), make_workload("hol", 60, seed=3)
    assert [request.kind for request in burst] == ["long"] * 5 + ["short"] * 55
    assert sorted(request.parts[0].seed for request in burst) == sorted(request.parts[0].seed for request in spread)


def test_zipf_lengths_are_bounded_and_mostly_short() -> None:
    requests = make_workload("zipf", 2000, seed=1)
    outputs = [request.output_tokens for request in requests]
    assert min(outputs) == ZIPF_OUTPUT_LENS[0] and max(outputs) <= ZIPF_OUTPUT_LENS[1]
    assert all(ZIPF_PROMPT_LENS[0] <= request.prompt_tokens <= ZIPF_PROMPT_LENS[1] for request in requests)
    assert statistics.median(outputs) < statistics.fmean(outputs) / 1.5


def test_zipf_weights() -> None:
    zipf, rng = ZipfRanks(3, 1.0), random.Random(0)
    counts = Counter(zipf.draw(rng) for _ in range(11_000))
    assert [counts[rank] for rank in range(3)] == pytest.approx([6000, 3000, 2000], rel=0.05)


def test_prefix_groups_share_the_first_tokens() -> None:
    requests = make_workload("prefix", 200, seed=1, num_groups=4, prefix_tokens=32)
    groups: dict[tuple[int, ...], int] = Counter(tuple(request.prompt_ids(1000, salt=5)[:32]) for request in requests)
    assert len(groups) == 4
    assert max(groups.values()) > 2 * min(groups.values())
    assert len({tuple(request.prompt_ids(1000, salt=5)) for request in requests}) == 200


def test_salt_gives_other_prompts_of_the_same_length() -> None:
    request = BenchRequest(0, 8, (PromptPart(1, 20), PromptPart(2, 30)))
    ids = request.prompt_ids(4096, salt=1)
    assert ids == request.prompt_ids(4096, salt=1)
    assert ids != request.prompt_ids(4096, salt=2)
    assert len(ids) == request.prompt_tokens == 50
    assert all(FIRST_ID <= token < 4096 for token in ids)
    assert len(request.prompt_text(salt=1).split()) == 50
    assert request.prompt_text(salt=1) != request.prompt_text(salt=2)


def test_salt_marks_a_given_text_at_its_beginning() -> None:
    request = BenchRequest(0, 8, text="Say hello.")
    assert request.prompt_text(salt=0) == "Say hello."
    assert request.prompt_text(salt=255) == "(ff) Say hello."


def test_clipped_keeps_what_is_shared() -> None:
    shared = PromptPart(1, 100)
    long, short = BenchRequest(0, 500, (shared, PromptPart(2, 100))), BenchRequest(1, 5, (shared, PromptPart(3, 10)))
    cut, kept = clipped([long, short], max_prompt_tokens=120, max_output_tokens=50)
    assert cut == BenchRequest(0, 50, (shared, PromptPart(2, 20)))
    assert kept == short
    assert clipped([long], None, None) == [long]


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_cv(cv: float) -> None:
    arrivals = drawn_arrivals(40_000, rate=20.0, cv=cv, seed=1)
    gaps = [later - earlier for earlier, later in itertools.pairwise([0.0, *arrivals])]
    assert min(gaps) >= 0
    assert statistics.fmean(gaps) == pytest.approx(1 / 20, rel=0.1)
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(cv, rel=0.1, abs=1e-6)


def test_a_seed_gives_one_process() -> None:
    one, same, other = (drawn_arrivals(10, 5.0, 2.0, seed) for seed in (3, 3, 4))
    assert one == same != other


def test_a_trace_is_stretched_if_it_has_a_span() -> None:
    assert replayed_arrivals([10.0, 11.0, 14.0], None, 0.5) == [0.0, 0.5, 2.0]
    assert replayed_arrivals([10.0, 11.0, 14.0], 1.5, 1.0) == [0.0, 0.5, 2.0]
    assert replayed_arrivals([3.0], 2.0, 1.0) == [0.0]
    assert replayed_arrivals([], None, 1.0) == []


AZURE = [
    "TIMESTAMP,ContextTokens,GeneratedTokens\n",
    "2023-11-16 18:17:03.9799600,4808,10\n",
    "2023-11-16 18:17:04.0319600,3180,8\n",
]
HEAD = "timestamp,input_length,output_length\n"


def test_csv_trace_in_seconds() -> None:
    lines = ["arrival_s,input_tokens,output_tokens\n", "0.0,374,44\n", "4.3145790,396,109\n"]
    requests = parse_trace("conv.csv", lines, 10, seed=1)
    assert [(each.prompt_tokens, each.output_tokens, each.arrival_s) for each in requests] == [
        (374, 44, 0.0),
        (396, 109, 4.314579),
    ]
    assert requests[0].parts != requests[1].parts


def test_csv_trace_under_the_names_of_azure() -> None:
    first, second = parse_trace("azure.csv", AZURE, 10, seed=1)
    assert first.arrival_s is not None and second.arrival_s is not None
    assert second.arrival_s - first.arrival_s == pytest.approx(0.052, abs=1e-5)
    assert (first.prompt_tokens, first.output_tokens) == (4808, 10)


def test_mooncakes_blocks_are_shared_parts() -> None:
    lines = [
        json.dumps({"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}),
        json.dumps({"timestamp": 3000, "input_length": 1024, "output_length": 7, "hash_ids": [0, 2]}),
    ]
    first, second = parse_trace("m.jsonl.gz", lines, 10, seed=1)
    assert first.parts == (PromptPart(0, 512), PromptPart(1, 88))
    assert second.parts == (PromptPart(0, 512), PromptPart(2, 512))
    assert second.arrival_s == 3.0
    assert first.prompt_ids(4096, salt=9)[:512] == second.prompt_ids(4096, salt=9)[:512]


def test_a_limit_reads_no_further() -> None:
    assert len(parse_trace("t.csv", [HEAD, "0,1,1\n", "broken\n"], 1, seed=1)) == 1


TOO_FEW_BLOCKS = json.dumps({"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0]})


@pytest.mark.parametrize(
    ("name", "lines", "named"),
    [
        ("t.csv", [HEAD, "x,1,1"], r"t\.csv line 2, timestamp"),
        ("t.csv", [HEAD, "0,many,1"], r"t\.csv line 2, input_length"),
        ("t.csv", [HEAD, "0,1,-4"], r"t\.csv line 2, output_length"),
        ("t.csv", [HEAD, "0,1,"], r"t\.csv line 2, output_tokens"),
        ("t.csv", [HEAD], "at least one request"),
        ("m.jsonl", [TOO_FEW_BLOCKS], "hash_ids"),
    ],
)
def test_a_wrong_line_of_a_trace_is_named(name: str, lines: list[str], named: str) -> None:
    with pytest.raises(InvalidValueError, match=named):
        parse_trace(name, lines, 5, seed=1)


def test_texts_and_their_output_lengths() -> None:
    lines = [
        json.dumps({"prompt": "Say A."}),
        json.dumps({"instruction": "Translate.", "user_input": "Haus", "output": "A house.", "app": "MT"}),
        json.dumps({"instruction": "Think.", "output_tokens": 77}),
    ]
    requests = parse_texts("t.jsonl", lines, 6, seed=1, output_tokens=128)
    assert [request.id for request in requests] == list(range(6))
    for pass_ in (requests[:3], requests[3:]):  # each once before any comes again
        found = {request.text: (request.output_tokens, request.kind) for request in pass_}
        assert found == {"Say A.": (128, ""), "Translate.\nHaus": (3, "MT"), "Think.": (77, "")}


@pytest.mark.parametrize("line", ["[1]", "{", '{"instruction": 3}', '{"text": "x"}'])
def test_a_wrong_text_is_named(line: str) -> None:
    with pytest.raises(InvalidValueError, match=r"t\.jsonl line 1"):
        parse_texts("t.jsonl", [line], 1, seed=1, output_tokens=8)


def test_prefix_groups() -> None:
    lines = [
        json.dumps({"workload": "w", "prefix": "P: ", "requests": [{"input": "a", "output": None}, {"input": "b"}]}),
        json.dumps({"workload": "v", "prefix": "Q: ", "turns": [["c", "d e"], [" f", "g"]], "tail": "x"}),
    ]
    requests = parse_prefix_groups("p.jsonl", lines, 40, seed=1, output_tokens=9)
    found = {(request.text, request.output_tokens, request.kind) for request in requests}
    assert found == {("P: a", 9, "w"), ("P: b", 9, "w"), ("Q: c", 2, "v"), ("Q: cd e f", 1, "v")}
    assert [request.id for request in requests] == list(range(40))


@pytest.mark.parametrize("entry", [{"requests": []}, {"requests": [{"output": "a"}]}, {"turns": [["a"]]}, {}])
def test_a_wrong_prefix_group_is_named(entry: dict[str, object]) -> None:
    with pytest.raises(InvalidValueError, match=r"p\.jsonl line 1, (requests|turns)"):
        parse_prefix_groups("p.jsonl", [json.dumps({"prefix": "P", **entry})], 1, seed=1, output_tokens=9)


def test_estimated_tokens() -> None:
    assert estimated_tokens("Don't panic, now!") == 7
    assert estimated_tokens("") == 1


def test_files_packed_or_not_broken_or_not_there(tmp_path: Path) -> None:
    plain, packed = tmp_path / "a.csv", tmp_path / "a.csv.gz"
    plain.write_text("ä\nb\n")
    packed.write_bytes(gzip.compress("ä\nb\n".encode()))
    for path in (plain, packed):
        with open_lines("--trace", path) as lines:
            assert list(lines) == ["ä\n", "b\n"]
    with pytest.raises(InvalidValueError, match="--trace"), open_lines("--trace", tmp_path / "none"):
        pass
    packed.write_bytes(gzip.compress(b"abc" * 1000)[:-20])
    with pytest.raises(InvalidValueError, match="--texts"), open_lines("--texts", packed) as lines:
        list(lines)
