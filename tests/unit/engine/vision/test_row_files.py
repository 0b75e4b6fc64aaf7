"""Rows in files: kept within a bound, held by who needs them, found by name alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from farsight.core.errors import InvalidValueError
from farsight.core.images import EncodedImage, ImageSpan, digest_of
from farsight.engine.vision.row_files import ORPHANED_S, RowHolder, RowStore, SharedEmbeddings, drop_rows, rows_name

HIDDEN = 4


def rows_of(seed: int, length: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(length, HIDDEN)).astype("<f4")


def name_of(seed: int, salt: str = "") -> str:
    return rows_name(digest_of(bytes([seed])), salt)


def image_of(seed: int) -> EncodedImage:
    return EncodedImage(b"12345678", 3, (1, 3), rows_of(seed).tobytes())


def kept(store: RowStore, seed: int) -> str:
    told = store.keep(name_of(seed), image_of(seed))
    assert told == EncodedImage(b"12345678", 3, (1, 3), rows=name_of(seed))
    return name_of(seed)


def span(name: str) -> ImageSpan:
    return ImageSpan(0, 3, b"12345678", (1, 3), rows=name)


def test_what_is_written_is_read_by_name(tmp_path: Path) -> None:
    store = RowStore(tmp_path / "rows", 1 << 20, "e")
    name = kept(store, 1)
    found = SharedEmbeddings(tmp_path / "rows").rows(span(name), HIDDEN)
    assert np.array_equal(found, rows_of(1))
    assert not found.flags.writeable
    stored = store.find(name)
    assert stored is not None and stored.num_tokens == 3 and stored.grid == (1, 3)
    with pytest.raises(InvalidValueError, match="rows of 5"):
        SharedEmbeddings(tmp_path / "rows").rows(span(name), 5)


def test_rows_that_come_with_a_request_need_no_file(tmp_path: Path) -> None:
    carried = ImageSpan(0, 3, b"12345678", (1, 3), rows_of(2).tobytes())
    assert np.array_equal(SharedEmbeddings(tmp_path / "none").rows(carried, HIDDEN), rows_of(2))


def test_the_longest_unused_go_first(tmp_path: Path) -> None:
    size = rows_of(1).nbytes
    store = RowStore(tmp_path / "rows", 2 * size, "e")
    first, second = kept(store, 1), kept(store, 2)
    assert store.find(first) is not None
    third = kept(store, 3)
    assert store.find(second) is None
    assert store.num_bytes == 2 * size and len(store) == 2
    assert sorted(os.listdir(tmp_path / "rows" / "kept" / "e")) == sorted([first, third])


def test_what_is_held_stays_until_the_last_release(tmp_path: Path) -> None:
    root = tmp_path / "rows"
    store = RowStore(root, 1, "e")
    first = kept(store, 1)
    holder = RowHolder(root, "a")
    assert holder.hold(first) and holder.hold(first)
    kept(store, 2)  # in place of the first
    assert store.find(first) is None
    source = SharedEmbeddings(root)
    holder.release(first)
    assert np.array_equal(source.rows(span(first), HIDDEN), rows_of(1))
    successor = RowHolder(root, "b")  # of a stream that another process goes on with
    assert successor.hold(first)
    holder.release(first)
    assert len(holder) == 0
    assert np.array_equal(source.rows(span(first), HIDDEN), rows_of(1))
    successor.close()
    with pytest.raises(InvalidValueError, match="kept until"):
        source.rows(span(first), HIDDEN)
    assert not holder.hold(first)


def test_a_new_store_goes_on_with_what_it_finds(tmp_path: Path) -> None:
    root = tmp_path / "rows"
    store = RowStore(root, 1 << 20, "e")
    name, cut = kept(store, 1), kept(store, 2)
    path = root / "kept" / "e" / cut
    path.write_bytes(path.read_bytes()[:-1])
    (root / "kept" / "e" / ".unfinished").write_bytes(b"")
    again = RowStore(root, 1 << 20, "e")
    assert again.find(name) == store.find(name)
    assert again.find(cut) is None
    assert os.listdir(root / "kept" / "e") == [name]
    assert again.num_bytes == rows_of(1).nbytes


def test_what_dead_processes_held_is_dropped_after_a_time(tmp_path: Path) -> None:
    root = tmp_path / "rows"
    store = RowStore(root, 1 << 20, "e")
    name = kept(store, 1)
    mine = RowHolder(root, "mine")
    assert mine.hold(name)
    hold = f"RowHolder(Path({str(root)!r}), 'x').hold({name!r})"
    code = f"from pathlib import Path; from farsight.engine.vision.row_files import RowHolder; {hold}"
    subprocess.run([sys.executable, "-c", code], check=True)
    folders = list((root / "held").iterdir())
    assert len(folders) == 2
    newest = max(folder.stat().st_mtime for folder in folders)
    store.sweep(newest + ORPHANED_S - 1)
    assert len(list((root / "held").iterdir())) == 2
    store.sweep(newest + ORPHANED_S + 1)
    [left] = (root / "held").iterdir()
    assert left.name.endswith("-mine")


def test_an_encoder_drops_nothing_of_another(tmp_path: Path) -> None:
    first, second = (RowStore(tmp_path / "rows", 1, owner) for owner in "ab")
    name = kept(first, 1)
    kept(second, 2)
    kept(second, 3)
    assert first.find(name) is not None
    assert np.array_equal(SharedEmbeddings(tmp_path / "rows").rows(span(name), HIDDEN), rows_of(1))


def test_rows_of_an_encoder_that_is_taken_away_go_and_those_that_are_held_stay(tmp_path: Path) -> None:
    root = tmp_path / "rows"
    first, second = (RowStore(root, 1 << 20, owner) for owner in "ab")
    held, dropped, other = kept(first, 1), kept(first, 2), kept(second, 3)
    holder = RowHolder(root, "mine")
    assert holder.hold(held)
    drop_rows(root, "a")
    drop_rows(root, "a")  # by a Supervisor that does it again
    assert os.listdir(root / "kept") == ["b"]
    for name, seed in ((held, 1), (other, 3)):
        assert np.array_equal(SharedEmbeddings(root).rows(span(name), HIDDEN), rows_of(seed))
    assert not holder.hold(dropped)


def test_what_somebody_else_removed_is_known_to_be_gone(tmp_path: Path) -> None:
    store = RowStore(tmp_path / "rows", 1 << 20, "e")
    name = kept(store, 1)
    (tmp_path / "rows" / "kept" / "e" / name).unlink()
    assert store.find(name) is None
    assert store.num_bytes == 0
    kept(store, 1)
    assert store.find(name) is not None


def test_rows_that_cannot_be_written_go_with_the_answer(tmp_path: Path) -> None:
    store = RowStore(tmp_path, 1 << 20, "e")
    folder = tmp_path / "kept" / "e"
    folder.rmdir()
    folder.write_bytes(b"")  # a file where the directory was
    assert store.keep(name_of(1), image_of(1)) == image_of(1)
    assert store.find(name_of(1)) is None


def test_who_has_another_salt_has_another_name() -> None:
    assert name_of(1) != name_of(1, "tenant")
    assert name_of(1, "tenant") == name_of(1, "tenant")


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "a" * 47, "a" * 46 + "/b"])
def test_a_name_leads_nowhere_else(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidValueError):
        RowHolder(tmp_path, "a").hold(name)
    if name:
        with pytest.raises(InvalidValueError):
            SharedEmbeddings(tmp_path).rows(span(name), HIDDEN)


def test_only_their_user_reads_them(tmp_path: Path) -> None:
    store = RowStore(tmp_path / "rows", 1 << 20, "e")
    path = tmp_path / "rows" / "kept" / "e" / kept(store, 1)
    assert (tmp_path / "rows").stat().st_mode & 0o077 == 0
    assert path.stat().st_mode & 0o077 == 0
