"""The format: what is read, what is refused and how that is said, what is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from core.errors import InvalidValueError
from services.api.batches.lines import answered, read_batch, read_result, unsent
from tests.unit.services.batch.batch_support import CHAT, request, write_batch


def test_lines_are_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    first, second = json.dumps(request("a")), json.dumps(request("b", CHAT, stream=False), ensure_ascii=False)
    path.write_text(f"\n{first}\r\n  \n{second}", encoding="utf-8")
    batch = read_batch(path)
    assert [(line.number, line.custom_id, line.url) for line in batch.lines] == [
        (2, "a", "/v1/completions"),
        (4, "b", "/v1/chat/completions"),
    ]
    assert json.loads(batch.lines[1].body) == request("b", CHAT, stream=False)["body"]


def test_line_separator_inside_a_string_ends_no_line(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(request("a", prompt="x\u2028y\x85z"), ensure_ascii=False), encoding="utf-8")
    (line,) = read_batch(path).lines
    assert json.loads(line.body)["prompt"] == "x\u2028y\x85z"


def test_sha256_is_of_the_bytes(tmp_path: Path) -> None:
    one = read_batch(write_batch(tmp_path / "a", [request("a")]))
    same = read_batch(write_batch(tmp_path / "b", [request("a")]))
    other = read_batch(write_batch(tmp_path / "c", [request("b")]))
    assert one.sha256 == same.sha256 != other.sha256


@pytest.mark.parametrize(
    ("change", "field", "found", "expected"),
    [
        ({"custom_id": None}, "custom_id", "None", "a non-empty string"),
        ({"custom_id": 7}, "custom_id", "7", "a non-empty string"),
        ({"custom_id": ""}, "custom_id", "''", "a non-empty string"),
        ({"custom_id": "first"}, "custom_id", "'first'", "one that no other line has; line 1 has it"),
        ({"method": "GET"}, "method", "'GET'", "'POST'"),
        (
            {"url": "/v1/models"},
            "url",
            "'/v1/models'",
            "'/v1/chat/completions' or '/v1/completions' or '/v1/embeddings'",
        ),
        ({"url": ["x"]}, "url", "['x']", "'/v1/chat/completions' or '/v1/completions' or '/v1/embeddings'"),
        ({"body": None}, "body", "None", "an object, the request as it would be sent to url"),
        ({"body": {"stream": True}}, "body.stream", "True", "false or no such field; a batch keeps whole answers"),
    ],
)
def test_wrong_field_is_named(tmp_path: Path, change: dict[str, Any], field: str, found: str, expected: str) -> None:
    path = write_batch(tmp_path / "in.jsonl", [request("first"), {**request("second"), **change}])
    with pytest.raises(InvalidValueError) as refused:
        read_batch(path)
    assert str(refused.value) == f"{path} line 2, {field}: got {found}, expected {expected}"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"custom_id": ', "a JSON object (Expecting value at column 15)"),
        (b"[1]", "a JSON object"),
        (b"null", "a JSON object"),
        (b'{"a": NaN}', "a JSON object (NaN is not JSON)"),
        (b'{"a": "\xff"}', "UTF-8; byte 7 is not"),
        (b'{"a": ' + b"1" * 5000 + b"}", "a JSON object (Exceeds the limit"),
        (b'{"a": ' + b"[" * 200_000, "a JSON object nested less deeply"),
    ],
)
def test_line_that_is_no_json_object(tmp_path: Path, line: bytes, expected: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n\n" + line + b"\n")
    with pytest.raises(InvalidValueError) as refused:
        read_batch(path)
    assert str(refused.value).startswith(f"{path} line 3: got ")
    assert f"expected {expected}" in str(refused.value)


@pytest.mark.parametrize("data", [b"", b"\n \n"])
def test_empty_file(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(data)
    with pytest.raises(InvalidValueError, match="expected a file with at least one request"):
        read_batch(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="expected a readable file \\(No such file or directory\\)"):
        read_batch(tmp_path / "none.jsonl")


def test_answer() -> None:
    line = answered("a\ud800", 200, "req_9", b'{"text": "\xc3\xa9"}')
    fields = json.loads(line.data)
    assert fields.pop("id").startswith("batch_req_")
    response = {"status_code": 200, "request_id": "req_9", "body": {"text": "é"}}
    assert fields == {"custom_id": "a\ud800", "response": response, "error": None}
    assert not line.failed
    assert line.data.count(b"\n") == 1
    assert read_result(line.data) == line


def test_refusal_keeps_its_body() -> None:
    line = answered("a", 400, None, b'{"error": {"code": "invalid_value"}}')
    fields = json.loads(line.data)
    assert fields["error"] is None
    assert fields["response"]["status_code"] == 400
    assert fields["response"]["request_id"].startswith("req_")
    assert fields["response"]["body"] == {"error": {"code": "invalid_value"}}
    assert line.failed
    assert read_result(line.data) == line


def test_no_answer() -> None:
    line = unsent("a", "some_code", "Some reason.")
    fields = json.loads(line.data)
    assert fields["response"] is None
    assert fields["error"] == {"code": "some_code", "message": "Some reason."}
    assert line.failed
    assert read_result(line.data) == line


def test_answer_that_is_no_json() -> None:
    assert json.loads(answered("a", 200, None, b"<html>").data)["error"]["code"] == "invalid_response"


@pytest.mark.parametrize("data", [b"", b"\n", b"[]\n", b"{}\n", b'{"custom_id":"a","response":null}', b"\x00\x00\n"])
def test_what_is_no_result(data: bytes) -> None:
    assert read_result(data) is None
