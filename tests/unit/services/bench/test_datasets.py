"""Traces, texts and prefix groups from files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from core.errors import InvalidValueError
from services.bench.datasets import estimated_tokens, parse_prefix_groups, parse_texts, parse_trace
from services.bench.files import open_lines
from services.bench.requests import PromptPart

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
"""


def test_csv_trace_in_seconds() -> None:
    lines = ["arrival_s,input_tokens,output_tokens\n", "0.0,374,44\n", "4.3145790,396,109\n"]
    requests = parse_trace("conv.csv", lines, 10, seed=1)
    assert [(each.prompt_tokens, each.output_tokens, each.arrival_s) for each in requests] == [
        (374, 44, 0.0),
        (396, 109, 4.314579),
    ]
    assert requests[0].parts != requests[1].parts


def test_csv_trace_under_the_names_of_azure() -> None:
    first, second = parse_trace("azure.csv", AZURE.splitlines(keepends=True), 10, seed=1)
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
    lines = ["timestamp,input_length,output_length\n", "0,1,1\n", "broken\n"]
    assert len(parse_trace("t.csv", lines, 1, seed=1)) == 1


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("x,1,1", "timestamp"),
        ("0,many,1", "input_length"),
        ("0,1,-4", "output_length"),
        ("0,1,", "output_tokens"),
    ],
)
def test_a_wrong_line_of_a_trace_is_named(line: str, field: str) -> None:
    with pytest.raises(InvalidValueError, match=rf"t\.csv line 2, {field}"):
        parse_trace("t.csv", ["timestamp,input_length,output_length\n", line], 5, seed=1)


def test_too_few_blocks_are_refused() -> None:
    line = json.dumps({"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0]})
    with pytest.raises(InvalidValueError, match="hash_ids"):
        parse_trace("m.jsonl", [line], 5, seed=1)


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="at least one request"):
        parse_trace("t.csv", ["timestamp,input_length,output_length\n"], 5, seed=1)


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


def test_files_packed_or_not(tmp_path: Path) -> None:
    plain, packed = tmp_path / "a.csv", tmp_path / "a.csv.gz"
    plain.write_text("ä\nb\n")
    packed.write_bytes(gzip.compress("ä\nb\n".encode()))
    for path in (plain, packed):
        with open_lines("--trace", path) as lines:
            assert list(lines) == ["ä\n", "b\n"]


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="--trace"), open_lines("--trace", tmp_path / "none"):
        pass


def test_a_broken_packed_file(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"abc" * 1000)[:-20])
    with pytest.raises(InvalidValueError, match="--texts"), open_lines("--texts", path) as lines:
        list(lines)
