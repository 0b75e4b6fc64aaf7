"""Artefacts come back as they were, or not at all."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.artefact import FILE_NAME, MAX_ARRAYS, MAX_UNPACKED, ArtefactError, TrainedModel, from_bytes, load

ARTEFACT = TrainedModel(
    {"version": 3, "model": "forest", "share": 0.5}, {"a": np.arange(6).reshape(2, 3), "b": np.ones(4, np.float32)}
)
DATA = ARTEFACT.to_bytes()


def test_round_trip(tmp_path: Path) -> None:
    assert ARTEFACT.save(tmp_path / "new" / "dir") == tmp_path / "new" / "dir" / FILE_NAME
    for path in (tmp_path / "new" / "dir", tmp_path / "new" / "dir" / FILE_NAME):
        found = load(path)
        assert found.metadata == ARTEFACT.metadata
        assert found.arrays.keys() == ARTEFACT.arrays.keys()
        for name, array in ARTEFACT.arrays.items():
            assert found.arrays[name].dtype == array.dtype
            assert found.arrays[name].tolist() == array.tolist()
    assert [each.name for each in (tmp_path / "new" / "dir").iterdir()] == [FILE_NAME]


@given(st.integers(0, len(DATA) - 1), st.integers(1, 255))
def test_a_changed_byte_never_changes_what_is_served(place: int, change: int) -> None:
    data = bytearray(DATA)
    data[place] ^= change
    try:
        found = from_bytes(bytes(data))
    except ArtefactError:
        return  # a zip has bytes that mean nothing; a change there may go unseen
    assert found.metadata == ARTEFACT.metadata
    assert all(found.arrays[name].tolist() == array.tolist() for name, array in ARTEFACT.arrays.items())


@pytest.mark.parametrize("length", [0, 10, len(DATA) // 2, len(DATA) - 1])
def test_cut_off(length: int) -> None:
    with pytest.raises(ArtefactError, match=r"from the store: no forecast artefact, or cut off .* train it again"):
        from_bytes(DATA[:length], "from the store")


def test_arrays_of_another_training_are_seen_by_the_checksum() -> None:
    other = TrainedModel(ARTEFACT.metadata, {**ARTEFACT.arrays, "b": np.zeros(4, np.float32)}).to_bytes()
    buffer = io.BytesIO()
    ours, theirs = zipfile.ZipFile(io.BytesIO(DATA)), zipfile.ZipFile(io.BytesIO(other))
    with ours, theirs, zipfile.ZipFile(buffer, "w") as mixed:
        for name in ours.namelist():
            mixed.writestr(name, (theirs if name == "b.npy" else ours).read(name))
    with pytest.raises(ArtefactError, match="checksum"):
        from_bytes(buffer.getvalue())


def test_another_format_is_named() -> None:
    buffer = io.BytesIO()
    np.savez(buffer, a=np.ones(2))
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr("metadata.json", '{"format": 99}')
    with pytest.raises(ArtefactError, match="format 99, but this Farsight reads 1"):
        from_bytes(buffer.getvalue())


def test_objects_are_not_unpickled() -> None:
    buffer = io.BytesIO()
    np.savez(buffer, a=np.array([{"x": 1}], dtype=object))
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr("metadata.json", '{"format": 1}')
    with pytest.raises(ArtefactError, match="no forecast artefact"):
        from_bytes(buffer.getvalue())


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match=r"forecaster.npz: cannot be read .*farsight train"):
        load(tmp_path)


@pytest.mark.parametrize("size", [MAX_UNPACKED + 1, 1 << 40])
def test_a_file_that_unpacks_to_more_than_fits_is_not_unpacked(size: int) -> None:
    """The directory of a zip says how much it holds; what lies about that is cut off by the reader of zips."""
    data = bytearray(DATA)
    at = data.rindex(b"PK\x01\x02")
    data[at + 24 : at + 28] = min(size, 0xFFFFFFFE).to_bytes(4, "little")
    with pytest.raises(ArtefactError, match="bytes; at most"):
        from_bytes(bytes(data))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for number in range(MAX_ARRAYS + 1):
            archive.writestr(f"{number}.npy", b"")
    with pytest.raises(ArtefactError, match="arrays of 0 bytes"):
        from_bytes(buffer.getvalue())
