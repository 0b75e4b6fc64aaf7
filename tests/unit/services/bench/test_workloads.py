"""What is sent, and when in an open loop: seeded workloads; traces, texts and prefix groups from files."""

from __future__ import annotations

import itertools
import json
import random
import re
import statistics
from collections import Counter
from pathlib import Path

import pytest

from farsight.services.bench.datasets import (
    chat_requests,
    estimated_tokens,
    prefix_requests,
    text_requests,
    trace_requests,
)
from farsight.services.bench.requests import FIRST_ID, BenchRequest, PromptPart, clipped
from farsight.services.bench.targets import BodyForm, make_call
from farsight.services.bench.workloads import (
    LONG_LENS,
    LONG_PERIOD,
    OUTPUT_LENS,
    PROMPT_LENS,
    SHORT_LENS,
    TURNS,
    WORKLOADS,
    ZIPF_OUTPUT_LENS,
    ZIPF_PROMPT_LENS,
    ZipfRanks,
    drawn_arrivals,
    make_conversations,
    make_workload,
    replayed_arrivals,
)
from farsight.simulator.traffic.traces import TraceError


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


def test_prompts_of_a_trace_differ_unless_it_says_what_they_share(tmp_path: Path) -> None:
    path = tmp_path / "conv.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n0.0,374,44\n4.3145790,396,109\n5,1,1\n")
    first, second = trace_requests(path, 2, seed=1)
    assert (second.prompt_tokens, second.output_tokens, second.arrival_s) == (396, 109, 4.314579)
    assert first.parts != second.parts
    row = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
    other = row | {"timestamp": 3000, "input_length": 1024, "hash_ids": [0, 2]}
    own = {"arrived_at": 4, "prompt_len": 700, "output_len": 5, "prefix": [0]}
    first, second = trace_requests(_lines(tmp_path / "m.jsonl", row, other), 10, seed=1)
    assert first.parts == (PromptPart(0, 512), PromptPart(1, 88))
    assert second.parts == (PromptPart(0, 512), PromptPart(2, 512))
    (third,) = trace_requests(_lines(tmp_path / "own.jsonl", own), 10, seed=1)
    assert third.parts[0] == PromptPart(0, 512) and third.prompt_tokens == 700
    assert first.prompt_ids(4096, salt=9)[:512] == second.prompt_ids(4096, salt=9)[:512]


def _lines(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_texts_and_their_output_lengths(tmp_path: Path) -> None:
    path = _lines(
        tmp_path / "t.jsonl",
        {"prompt": "Say A."},
        {"instruction": "Translate.", "user_input": "Haus", "output": "A house.", "app": "MT"},
        {"instruction": "Think.", "output_tokens": 77},
    )
    requests = text_requests(path, 6, seed=1, output_tokens=128)
    assert [request.id for request in requests] == list(range(6))
    for pass_ in (requests[:3], requests[3:]):  # each once before any comes again
        found = {request.text: (request.output_tokens, request.kind) for request in pass_}
        assert found == {"Say A.": (128, ""), "Translate.\nHaus": (3, "MT"), "Think.": (77, "")}


SYSTEM, ASKED, SAID = ({"role": role, "content": role[0]} for role in ("system", "user", "assistant"))
SHAREGPT = {
    "conversations": [{"from": who, "value": said} for who, said in (("gpt", "0"), ("human", "1"), ("human", "2"))]
}


@pytest.mark.parametrize(
    ("name", "content", "asked"),
    [
        ("a.txt", "[1] Who?\n\nWhy?\n", {"[1] Who?": (), "Why?": ()}),
        ("a.jsonl", json.dumps({"instruction": "A.", "input": "B", "output": "C"}), {"A.\nB": ()}),
        (
            "m.jsonl",
            json.dumps({"messages": [SYSTEM, ASKED, SAID, ASKED, SAID]}),
            {"u": (("system", "s"), ("user", "u"), ("assistant", "a"))},
        ),
        ("s.json", json.dumps([SHAREGPT, {"conversations": []}, {"messages": [SAID]}], indent=1), {"1": ()}),
    ],
)
def test_chats_as_people_have_them(tmp_path: Path, name: str, content: str, asked: dict[str, object]) -> None:
    path = tmp_path / name
    path.write_text(content)
    requests = chat_requests(path, len(asked), seed=1, most_tokens=9)
    assert {request.text: request.before for request in requests} == asked
    assert {request.output_tokens for request in requests} == {9}
    body = json.loads(make_call(requests[0], "m", BodyForm(endpoint="chat"), salt=0).body)
    assert [*requests[0].before, ("user", requests[0].text)] == [tuple(each.values()) for each in body["messages"]]


def test_chats_that_are_too_long_are_left_out(tmp_path: Path) -> None:
    path = _lines(tmp_path / "m.jsonl", {"prompt": "One two."}, {"messages": [SYSTEM, ASKED, SAID, ASKED]})
    assert {each.text for each in chat_requests(path, 5, seed=1, most_tokens=9, longest_prompt=4)} == {"One two.", "u"}
    assert {each.text for each in chat_requests(path, 5, seed=1, most_tokens=9, longest_prompt=3)} == {"One two."}
    with pytest.raises(TraceError, match="too great a length"):
        chat_requests(path, 5, seed=1, most_tokens=9, longest_prompt=2)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("t.jsonl", '{"instruction": 3}', "t.jsonl:1: instruction is not a text"),
        ("t.jsonl", '{"text": "x"}', "t.jsonl:1: missing column instruction"),
        ("t.jsonl", '{"messages": ["x"]}', "t.jsonl:1: messages is not a list"),
        ("t.jsonl", '{"messages": [{"role": "user", "content": []}]}', "t.jsonl:1: messages is not a list"),
        ("t.json", '[{"prompt": "x"}, {"conversations": 3}]', "t.json:2: conversations is not a list"),
        ("t.json", '[{"prompt": "x"}', "t.json:0: broken JSON"),
        ("t.json", "[1]", "t.json:0: not an array of JSON objects"),
        ("t.json", "", "t.json:0: the file is empty"),
        ("t.txt", "\n", "t.txt:0: no user speaks"),
    ],
)
def test_a_wrong_chat_is_named(tmp_path: Path, name: str, content: str, reason: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(TraceError, match=re.escape(reason)):
        chat_requests(path, 1, seed=1, most_tokens=8)


def test_prefix_groups(tmp_path: Path) -> None:
    path = _lines(
        tmp_path / "p.jsonl",
        {"workload": "w", "prefix": "P: ", "requests": [{"input": "a", "output": None}, {"input": "b"}]},
        {"workload": "v", "prefix": "Q: ", "turns": [["c", "d e"], [" f", "g"]], "tail": "x"},
    )
    requests = prefix_requests(path, 40, seed=1, output_tokens=9)
    found = {(request.text, request.output_tokens, request.kind) for request in requests}
    assert found == {("P: a", 9, "w"), ("P: b", 9, "w"), ("Q: c", 2, "v"), ("Q: cd e f", 1, "v")}
    assert [request.id for request in requests] == list(range(40))


@pytest.mark.parametrize("entry", [{"requests": []}, {"requests": [{"output": "a"}]}, {"turns": [["a"]]}, {}])
def test_a_wrong_prefix_group_is_named(tmp_path: Path, entry: dict[str, object]) -> None:
    path = _lines(tmp_path / "p.jsonl", {"prefix": "P", **entry})
    with pytest.raises(TraceError, match=r"p\.jsonl:1: (requests|turns) is not a list"):
        prefix_requests(path, 1, seed=1, output_tokens=9)


def test_estimated_tokens() -> None:
    assert estimated_tokens("Don't panic, now!") == 7
    assert estimated_tokens("") == 1


def test_turns_of_a_conversation_go_on_where_the_last_one_ended() -> None:
    requests, gaps_s = make_conversations(3, 6000, seed=1)
    assert len(requests) == len(gaps_s) == 3 * TURNS
    for first in range(0, len(requests), TURNS):
        talk = [request.parts for request in requests[first : first + TURNS]]
        assert all(later[:-1] == earlier for earlier, later in itertools.pairwise(talk))
        assert 5900 <= requests[first + TURNS - 1].prompt_tokens <= 6000
    assert make_conversations(3, 6000, seed=1)[0] == requests
