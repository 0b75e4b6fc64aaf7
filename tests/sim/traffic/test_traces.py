"""Trace readers: every format, and what each bad file is told."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path

import pytest

from farsight.simulator.traffic.traces import (
    MissingTraceError,
    TraceError,
    count_tokens,
    find_data,
    read_texts,
    read_trace,
)
from farsight.simulator.traffic.workload import SimImage, SimRequest

AZURE = "arrival_s,input_tokens,output_tokens\n0.0,374,44\n1.5,396,109\n"
PUBLISHED_AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:48.1805900,396,109\n"
)
MOONCAKE = '{"arrival_s": 2, "input_tokens": 600, "output_tokens": 5, "hash_ids": [0, 7]}\n'
PUBLISHED_MOONCAKE = '{"timestamp": 2000, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]}\n'
OWN = {"arrived_at": 1.0, "prompt_len": 4, "output_len": 9}


def _file(folder: Path, content: str | bytes, name: str = "trace") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def _own(**fields: object) -> str:
    return json.dumps({**OWN, **fields}) + "\n"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("content", [AZURE, PUBLISHED_AZURE])
def test_azure_and_mooncake_as_published_and_as_shared(tmp_path: Path, content: str, packed: bool) -> None:
    data = gzip.compress(content.encode()) if packed else content.encode()
    first, second = read_trace(_file(tmp_path, data))
    assert (first.prompt_len, first.output_len, first.max_new_tokens) == (374, 44, 109)
    assert (second.prompt_len, second.output_len) == (396, 109)
    assert second.arrived_at - first.arrived_at == pytest.approx(1.5)
    assert first.request_id != second.request_id
    for mooncake in (MOONCAKE, PUBLISHED_MOONCAKE):
        (arrival,) = read_trace(_file(tmp_path, mooncake))
        assert (arrival.arrived_at, arrival.prompt_len, arrival.output_len, arrival.prefix) == (2.0, 600, 5, (0, 7))


def test_our_own_format_with_everything(tmp_path: Path) -> None:
    line = _own(max_new_tokens=20, prefix=[1, 2], app="chat", priority=-1, deadline_s=3.5)
    assert read_trace(_file(tmp_path, line)) == [
        SimRequest("trace-1", 1.0, 4, 9, 20, prefix=(1, 2), app="chat", priority=-1, deadline_s=3.5)
    ]
    line = _own(tenant="acme", weight=2) + "\n" + _own(output_len=30, max_new_tokens=25)
    tenants, later = read_trace(_file(tmp_path, line), "own", max_new_tokens=5)
    assert tenants == SimRequest("trace-1", 1.0, 4, 5, 5, app="trace", tenant="acme", weight=2.0)
    assert later == SimRequest("trace-3", 1.0, 4, 25, 25, app="trace"), "blank lines count but do not matter"


def _bad_files() -> list[tuple[str, str | bytes, int, str]]:
    header, first, _ = AZURE.splitlines()
    row = f"{header}\n{first}\n"
    return [
        ("empty", "", 0, "the file is empty"),
        ("empty gzip", gzip.compress(b""), 0, "the file is empty"),
        ("header only", header + "\n", 1, "a header and nothing else"),
        ("missing column", "arrival_s,input_tokens\n0,5\n", 2, "missing column output_tokens"),
        ("missing key", _own() + '{"arrived_at": 1, "prompt_len": 2}\n', 2, "missing column output_len"),
        ("missing cell", row + "1.0,5\n", 3, "2 cells under 3 columns"),
        ("negative length", row + "1.0,-5,3\n", 3, "input_tokens is negative: -5"),
        ("negative instant", row + "-1.0,5,3\n", 3, "arrival_s is negative: -1"),
        ("no output", row + "1.0,5,0\n", 3, "output_tokens is not a whole number of at least 1: 0"),
        ("part of a token", row + "1.0,5.5,3\n", 3, "input_tokens is not a whole number of at least 1: 5.5"),
        ("not a number", row + "1.0,five,3\n", 3, "input_tokens is not a number: 'five'"),
        ("nan", row + "nan,5,3\n", 3, "arrival_s is not a number: 'nan'"),
        ("a truth value", _own(prompt_len=True), 1, "prompt_len is not a number: True"),
        ("unsorted", row + "2.0,5,3\n1.0,5,3\n", 4, "arrives at 1 s, before the line above at 2 s"),
        ("broken JSON", _own() + '{"arrived_at": 1,\n', 2, "broken JSON: "),
        ("not an object", _own() + "[1]\n", 2, "not a JSON object"),
        ("no known format", "a,b\n1,2\n", 2, "columns of no known format: a, b"),
        ("not a date", PUBLISHED_AZURE + "yesterday,5,3\n", 4, "TIMESTAMP is not a date and time: 'yesterday'"),
        ("dates with and without a zone", PUBLISHED_AZURE + "2023-11-16T19:00:00Z,5,3\n", 4, "TIMESTAMP is not"),
        ("hash ids too few", MOONCAKE.replace("[0, 7]", "[0]"), 1, "1 hash_ids for 600 prompt tokens"),
        ("hash ids negative", MOONCAKE.replace("[0, 7]", "[0, -7]"), 1, "hash_ids is not a list of whole numbers"),
        ("a name not a text", _own(app=3), 1, "app is not a text: 3"),
        ("a tenant of no weight", _own(tenant="acme", weight=0), 1, "weight is not above 0"),
        ("half a priority", _own(priority=0.5), 1, "priority is not a whole number: 0.5"),
        ("more image than prompt", _own(image_tokens=5), 1, "image_tokens are 5, more than the prompt's 4"),
        ("half an image token", _own(image_tokens=1.5), 1, "image_tokens is not a whole number of at least 0"),
        ("a negative picture", _own(image_tokens=[2, -1]), 1, "image_tokens is not a whole number of at least 0"),
        ("endless pictures", _own(image_tokens="inf"), 1, "image_tokens is not a whole number of at least 0"),
        ("an empty picture", _own(image_tokens=[2, 0]), 1, "image_tokens holds a picture of no tokens: [2, 0]"),
        ("a name for no picture", _own(image="cat"), 1, "1 names in image for 0 pictures"),
        ("names too few", _own(image_tokens=[1, 1], image=["cat"]), 1, "1 names in image for 2 pictures"),
        ("a name that is a number", _own(image_tokens=1, image=[7]), 1, "image is not a text or a list of texts: [7]"),
        ("not UTF-8", row.encode() + b"\xff\xfe,1,1\n", 3, "not UTF-8"),
    ]


@pytest.mark.parametrize(("content", "line", "reason"), [b[1:] for b in _bad_files()], ids=[b[0] for b in _bad_files()])
def test_a_bad_file_is_told_its_line_and_reason(tmp_path: Path, content: str | bytes, line: int, reason: str) -> None:
    path = _file(tmp_path, content)
    with pytest.raises(TraceError) as error:
        read_trace(path)
    assert error.value.line == line
    assert str(error.value).startswith(f"{path}:{line}: {reason}")


def test_a_file_that_is_cut_off_damaged_not_there_or_of_another_format(tmp_path: Path) -> None:
    packed = gzip.compress("".join(_own(arrived_at=i) for i in range(200)).encode())
    with pytest.raises(TraceError, match="the gzip file is cut off") as error:
        read_trace(_file(tmp_path, packed[: len(packed) // 2]))
    assert error.value.line >= 1
    damaged = bytearray(gzip.compress(AZURE.encode()))
    damaged[-5] ^= 0xFF  # its checksum and length stand at the end
    with pytest.raises(TraceError, match="damaged gzip"):
        read_trace(_file(tmp_path, bytes(damaged)))
    with pytest.raises(TraceError, match="none:0: No such file"):
        read_trace(tmp_path / "none")
    path = _file(tmp_path, AZURE)
    with pytest.raises(TraceError, match="unknown format burst; known: azure, mooncake, own"):
        read_trace(path, "burst")
    with pytest.raises(TraceError, match="trace:2: missing column arrived_at"):
        read_trace(path, "own")


def test_texts_become_lengths(tmp_path: Path) -> None:
    words = {"id": "x", "app": "MT", "task": "mt", "instruction": "Do it.", "user_input": "a b c d e f g"}
    lines = [{**words, "output": "a b c d e f g h i j"}, {**words, "task": "alpaca", "output": "one"}]
    plain, stretched = read_texts(_file(tmp_path, "".join(json.dumps(x) + "\n" for x in lines)))
    assert (plain.prompt_len, plain.output_len, plain.app, plain.max_new_tokens) == (13, 52, "mt", 52)
    assert (stretched.output_len, stretched.app) == (16, "alpaca")
    line = json.dumps({"id": "x", "task": "mt", "instruction": "", "user_input": ""})
    with pytest.raises(TraceError, match="trace:1: missing column output") as error:
        read_texts(_file(tmp_path, line))
    again = pickle.loads(pickle.dumps(error.value))
    assert (again.line, again.reason, str(again)) == (1, "missing column output", str(error.value))
    assert [count_tokens(t) for t in ("", "one", "Hello, big world!", "a b c d e f g h i j")] == [1, 2, 7, 13]


def test_data_is_found_in_the_folder_given_or_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, fixed = tmp_path / "given", tmp_path / "set"
    for folder in (given, fixed):
        folder.mkdir()
        _file(folder, AZURE, "azure.csv")
    monkeypatch.setenv("FARSIGHT_DATA", str(fixed))
    assert find_data("azure.csv") == fixed / "azure.csv"
    assert find_data("azure.csv", given) == given / "azure.csv"
    monkeypatch.delenv("FARSIGHT_DATA")
    with pytest.raises(MissingTraceError, match="shared/data/no-such-file does not exist"):
        find_data("no-such-file")
    for name, where in (("azure2023_conv.csv.gz", "Azure/Az"), ("mooncake_x", "kvcache-ai/Moo")):
        with pytest.raises(MissingTraceError, match=f"get it from https://github.com/{where}"):
            find_data(name, tmp_path)


def test_every_format_may_have_pictures(tmp_path: Path) -> None:
    cat, dog = SimImage(3, "cat"), SimImage(2, "dog")
    csv = (
        "arrival_s,input_tokens,output_tokens,image_tokens,image\n"
        "0.0,9,4,3,cat\n1.0,9,4,3;2,cat;dog\n2.0,9,4,0,\n3.0,9,4,,\n4.0,9,4,2;3,\n5.0,9,4,3;2,cat;\n"
    )
    found = [arrival.images for arrival in read_trace(_file(tmp_path, csv))]
    assert found == [(cat,), (cat, dog), (), (), (SimImage(2), SimImage(3)), (cat, SimImage(2))]
    lines = _own(image_tokens=3, image="cat") + _own(image_tokens=[3, 1]) + _own(image_tokens=0) + _own(image=None)
    found = [arrival.images for arrival in read_trace(_file(tmp_path, lines))]
    assert found == [(cat,), (SimImage(3), SimImage(1)), (), ()]
    mooncake = json.dumps({**json.loads(MOONCAKE), "image_tokens": 3, "image": "cat"}) + "\n"
    assert read_trace(_file(tmp_path, mooncake))[0].images == (cat,)
