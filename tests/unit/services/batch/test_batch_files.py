"""The files of a batch: what is written, what survives, what is refused and how that is said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from farsight.core.errors import FarsightError, IntegrityError, InvalidValueError
from farsight.services.api.batches.lines import Batch
from farsight.services.batch.progress import ProgressStore, partial_path
from tests.unit.services.batch.batch_support import numbered, read_output, result

pytestmark = pytest.mark.timeout(600)  # hundreds of writes wait for the disk, which others may keep busy


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    return numbered(tmp_path / "in.jsonl", 4)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def _finish(target: Path, batch: Batch) -> None:
    with ProgressStore.open(target, batch) as store:
        store.append([result(line.custom_id) for line in store.left()])
        store.finish()


def left(store: ProgressStore) -> list[str]:
    return [line.custom_id for line in store.left()]


def test_torn_tail_is_dropped_wherever_it_ends(target: Path, batch: Batch) -> None:
    with ProgressStore.open(target, batch) as store:
        store.append([result("id-2", status=404), result("id-0")])
        assert (store.num_done, store.num_failed) == (2, 1)
    whole = partial_path(target).read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for end in range(last, len(whole)):
        partial_path(target).write_bytes(whole[:end])
        with ProgressStore.open(target, batch) as store:
            assert (store.num_failed, left(store)) == (1, ["id-0", "id-1", "id-3"]), end
            store.append([result("id-0", status=500)])
        with ProgressStore.open(target, batch) as store:
            assert (store.num_done, store.num_failed, left(store)) == (2, 2, ["id-1", "id-3"]), end


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
        assert left(store) == ["id-0", "id-1", "id-3"]
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
        assert left(store) == ["id-1", "id-3"]


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
