"""The files of a batch: what is read and written, what survives, what is refused and how that is said."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from core.errors import FarsightError, IntegrityError, InvalidValueError
from services.api.batches.lines import Batch, LineResult, answered, read_batch, read_result, unsent
from services.batch.progress import ProgressStore, partial_path
from tests.unit.services.batch.batch_support import CHAT, numbered, read_output, request, result, write_batch

pytestmark = pytest.mark.timeout(600)  # hundreds of writes wait for the disk, which others may keep busy


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    return numbered(tmp_path / "in.jsonl", 4)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def _finish(target: Path, batch: Batch) -> None:
    with ProgressStore.open(target, batch) as store:
        store.append([result(line.custom_id) for line in batch.lines if line.custom_id not in store])
        store.finish()


def test_torn_tail_is_dropped_wherever_it_ends(target: Path, batch: Batch) -> None:
    with ProgressStore.open(target, batch) as store:
        store.append([result("id-2", status=404), result("id-0")])
        assert (store.num_done, store.num_failed) == (2, 1)
    whole = partial_path(target).read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for end in range(last, len(whole)):
        partial_path(target).write_bytes(whole[:end])
        with ProgressStore.open(target, batch) as store:
            assert (store.num_done, store.num_failed, "id-0" in store) == (1, 1, False), end
            store.append([result("id-0", status=500)])
        with ProgressStore.open(target, batch) as store:
            assert (store.num_done, store.num_failed, "id-0" in store, "id-2" in store) == (2, 2, True, True), end


def test_torn_header_is_written_anew(target: Path, batch: Batch) -> None:
    ProgressStore.open(target, batch).close()
    header = partial_path(target).read_bytes()
    for end in range(len(header)):
        partial_path(target).write_bytes(header[:end])
        ProgressStore.open(target, batch).close()
        assert partial_path(target).read_bytes() == header


@pytest.mark.parametrize("damage", [b"\x00\x00\x00\n", result("id-2").data, result("unknown").data])
def test_nothing_behind_a_damaged_line_is_trusted(target: Path, batch: Batch, damage: bytes) -> None:
    with ProgressStore.open(target, batch) as store:
        store.append([result("id-2")])
    with partial_path(target).open("ab") as file:
        file.write(damage + result("id-1").data)
    with ProgressStore.open(target, batch) as store:
        assert (store.num_done, "id-2" in store) == (1, True)
    _finish(target, batch)
    assert len(read_output(target)) == 4


def test_progress_of_another_input_is_refused(target: Path, batch: Batch, tmp_path: Path) -> None:
    with ProgressStore.open(target, batch) as store:
        store.append([result("id-2")])
    before = partial_path(target).read_bytes()
    with pytest.raises(InvalidValueError) as refused:
        ProgressStore.open(target, numbered(tmp_path / "other.jsonl", 5))
    assert "got 'progress on another input'" in str(refused.value)
    assert f"delete {partial_path(target)} to start over" in str(refused.value)
    assert partial_path(target).read_bytes() == before


@pytest.mark.parametrize(
    ("found", "what"),
    [
        (b"notes of mine\n", "a file that farsight batch did not write"),
        (b'{"farsight_batch": 99}\n', "progress in format 99"),
    ],
)
def test_foreign_file_is_refused_and_left_alone(target: Path, batch: Batch, found: bytes, what: str) -> None:
    partial_path(target).write_bytes(found)
    with pytest.raises(InvalidValueError, match=what):
        ProgressStore.open(target, batch)
    assert partial_path(target).read_bytes() == found


def test_second_run_is_refused_while_the_first_goes_on(target: Path, batch: Batch) -> None:
    with ProgressStore.open(target, batch) as store:
        with pytest.raises(FarsightError, match="another run is writing to this file"):
            ProgressStore.open(target, batch)
        store.append([result("id-0")])
    ProgressStore.open(target, batch).close()


def test_lock_on_a_file_that_was_removed_meanwhile_is_no_lock(
    target: Path, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run finishes between the second's opening of the file and its locking."""
    first = ProgressStore.open(target, batch)
    first.append([result(line.custom_id) for line in batch.lines])
    opened: list[int] = []

    def open_late(path: str, flags: int, mode: int = 0o777) -> int:
        fd = real_open(path, flags, mode)
        if not opened:
            opened.append(fd)
            first.finish()
            first.close()
        return fd

    real_open = os.open
    second = Path(partial_path(target))
    monkeypatch.setattr(os, "open", lambda path, *rest: (open_late if path == second else real_open)(path, *rest))
    with pytest.raises(InvalidValueError, match="--overwrite"):
        ProgressStore.open(target, batch)
    assert opened
    assert len(read_output(target)) == 4
    assert not second.exists()


def test_finished_output_is_not_replaced_unless_told(target: Path, batch: Batch) -> None:
    _finish(target, batch)
    before = target.read_bytes()
    with pytest.raises(InvalidValueError, match="--overwrite") as refused:
        ProgressStore.open(target, batch)
    assert str(target) in str(refused.value)
    assert target.read_bytes() == before
    assert not partial_path(target).exists()
    with ProgressStore.open(target, batch, overwrite=True) as store:
        store.append([result("id-0")])
    with ProgressStore.open(target, batch) as store:  # it goes on without being told again
        assert store.num_done == 1
    _finish(target, batch)
    assert target.read_bytes() != before  # each result has an id of its own


@pytest.mark.parametrize("step", ["replace", "fsync", "unlink"])
def test_finishing_that_is_ended_is_done_again(
    target: Path, batch: Batch, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    class Killed(BaseException):
        pass

    def die(*args: object, **kwargs: object) -> None:
        raise Killed

    with ProgressStore.open(target, batch) as store:
        store.append([result(line.custom_id, "é" * 1000) for line in reversed(batch.lines)])
        with monkeypatch.context() as patch:
            patch.setattr(Path if step == "unlink" else os, step, die)
            with pytest.raises(Killed):
                store.finish()
    assert target.exists() == (step == "unlink")
    with ProgressStore.open(target, batch) as store:
        assert store.num_done == 4
        store.finish()
    assert [line["custom_id"] for line in read_output(target)] == [f"id-{i}" for i in range(4)]
    assert sorted(path.name for path in target.parent.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_incomplete_batch_is_not_finished(target: Path, batch: Batch) -> None:
    with ProgressStore.open(target, batch) as store:
        store.append([result("id-0")])
        with pytest.raises(IntegrityError, match="3 of 4 requests have no result"):
            store.finish()
    assert not target.exists()


@pytest.mark.parametrize("ids", [["id-0"], ["id-1", "id-1"], ["unknown"]])
def test_second_result_is_refused(target: Path, batch: Batch, ids: list[str]) -> None:
    with ProgressStore.open(target, batch) as store:
        store.append([result("id-0")])
        with pytest.raises(IntegrityError):
            store.append([result(each) for each in ids])
        assert store.num_done == 1


def test_full_disk_costs_only_what_did_not_fit(target: Path, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write = os.pwrite

    def write_half(fd: int, data: bytes, offset: int) -> int:
        real_write(fd, bytes(data)[: len(data) // 2], offset)
        raise OSError(28, "No space left on device")

    with ProgressStore.open(target, batch) as store:
        store.append([result("id-0")])
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", write_half)
            with pytest.raises(FarsightError, match="No space left on device; run the same command again"):
                store.append([result("id-1")])
        store.append([result("id-2")])
    with ProgressStore.open(target, batch) as store:
        assert [line.custom_id in store for line in batch.lines] == [True, False, True, False]


def test_look_leaves_nothing_behind_but_what_was_done(target: Path, batch: Batch) -> None:
    with ProgressStore.open(target, batch) as store:
        store.remove_if_empty()
    assert not partial_path(target).exists()
    with ProgressStore.open(target, batch) as store:
        store.append([result("id-0")])
        store.remove_if_empty()
    assert partial_path(target).exists()


def test_wrong_targets(batch: Batch, tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="another file than IN"):
        ProgressStore.open(batch.path, batch, overwrite=True)
    with pytest.raises(InvalidValueError, match="a file, not a directory"):
        ProgressStore.open(tmp_path, batch)
    with pytest.raises(InvalidValueError, match="in a directory that exists"):
        ProgressStore.open(tmp_path / "none" / "out.jsonl", batch)


def test_lines_are_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    first = json.dumps(request("a"))
    second = json.dumps(request("b", CHAT, stream=False, user="x\u2028y\x85z"), ensure_ascii=False)
    path.write_text(f"\n{first}\r\n  \n{second}", encoding="utf-8")
    batch = read_batch(path)
    assert [(line.number, line.custom_id, line.url) for line in batch.lines] == [
        (2, "a", "/v1/completions"),
        (4, "b", "/v1/chat/completions"),
    ]
    body = request("b", CHAT, stream=False, user="x\u2028y\x85z")["body"]
    assert json.loads(batch.lines[1].body) == body, "a line separator inside a string ends no line"


def test_sha256_is_of_the_bytes(tmp_path: Path) -> None:
    one = read_batch(write_batch(tmp_path / "a", [request("a")]))
    same = read_batch(write_batch(tmp_path / "b", [request("a")]))
    other = read_batch(write_batch(tmp_path / "c", [request("b")]))
    assert one.sha256 == same.sha256 != other.sha256


SERVED = "'/v1/chat/completions' or '/v1/completions' or '/v1/embeddings'"


@pytest.mark.parametrize(
    ("change", "field", "found", "expected"),
    [
        ({"custom_id": None}, "custom_id", "None", "a non-empty string"),
        ({"custom_id": 7}, "custom_id", "7", "a non-empty string"),
        ({"custom_id": ""}, "custom_id", "''", "a non-empty string"),
        ({"custom_id": "first"}, "custom_id", "'first'", "one that no other line has; line 1 has it"),
        ({"method": "GET"}, "method", "'GET'", "'POST'"),
        ({"url": "/v1/models"}, "url", "'/v1/models'", SERVED),
        ({"url": ["x"]}, "url", "['x']", SERVED),
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
def test_empty_file_or_none(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "in.jsonl"
    with pytest.raises(InvalidValueError, match="expected a readable file \\(No such file or directory\\)"):
        read_batch(path)
    path.write_bytes(data)
    with pytest.raises(InvalidValueError, match="expected a file with at least one request"):
        read_batch(path)


@pytest.mark.parametrize(
    ("line", "failed", "response", "error"),
    [
        (
            answered("a\ud800", 200, "req_9", b'{"text": "\xc3\xa9"}'),
            False,
            {"status_code": 200, "request_id": "req_9", "body": {"text": "é"}},
            None,
        ),
        (
            answered("a\ud800", 400, "req_9", b'{"error": {"code": "invalid_value"}}'),
            True,
            {"status_code": 400, "request_id": "req_9", "body": {"error": {"code": "invalid_value"}}},
            None,
        ),
        (unsent("a\ud800", "some_code", "Why."), True, None, {"code": "some_code", "message": "Why."}),
    ],
    ids=["answer", "refusal", "no answer"],
)
def test_an_output_line(line: LineResult, failed: bool, response: object, error: object) -> None:
    fields = json.loads(line.data)
    assert fields.pop("id").startswith("batch_req_")
    assert fields == {"custom_id": "a\ud800", "response": response, "error": error}
    assert line.failed == failed
    assert line.data.count(b"\n") == 1
    assert read_result(line.data) == line


def test_answer_without_an_id_gets_one_and_one_that_is_no_json_becomes_an_error() -> None:
    assert json.loads(answered("a", 200, None, b"{}").data)["response"]["request_id"].startswith("req_")
    assert json.loads(answered("a", 200, None, b"<html>").data)["error"]["code"] == "invalid_response"


@pytest.mark.parametrize("data", [b"", b"\n", b"[]\n", b"{}\n", b'{"custom_id":"a","response":null}', b"\x00\x00\n"])
def test_what_is_no_result(data: bytes) -> None:
    assert read_result(data) is None
