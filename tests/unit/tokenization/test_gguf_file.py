"""Headers of GGUF files: what the format's own package writes is read, and what lies is refused at once."""

from __future__ import annotations

import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from farsight.tokenization.gguf_file import BLOCKS, MAX_ELEMENTS, GGUFError, gguf_architecture, is_gguf, read_gguf
from tests.unit.tokenization.gguf_hostile import ARRAY, STRING, UINT32, array, entry, tensor, text, write

MUCH = 1 << 60


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with metadata of every kind and two tensors."""
    path = tmp_path_factory.mktemp("gguf") / "good.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_uint8("small", 7)
    writer.add_int64("large", -(1 << 40))
    writer.add_float32("real", 0.5)
    writer.add_bool("yes", True)
    writer.add_string("word", "naïve 🙂")
    writer.add_array("words", ["a", "", "ü"])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_tensor("matrix", np.arange(64, dtype=np.float32).reshape(2, 32))
    rows = gguf.quants.quantize(np.ones((3, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blocks", rows, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_what_the_package_writes_is_read(good):
    file = read_gguf(good)
    scalars = {key: value for key, value in file.metadata.items() if key != "numbers"}
    assert scalars == {
        "general.architecture": "llama",
        "small": 7,
        "large": -(1 << 40),
        "real": 0.5,
        "yes": True,
        "word": "naïve 🙂",
        "words": ["a", "", "ü"],
    }
    assert file.numbers("numbers", 3, 0) == [1, 2, 3]
    assert [(t.name, t.shape, t.kind, t.num_bytes) for t in file.tensors.values()] == [
        ("matrix", (2, 32), "F32", 256),
        ("blocks", (3, 64), "Q8_0", 204),
    ]
    theirs = {each.name: int(each.data_offset) for each in gguf.GGUFReader(good).tensors}
    assert {name: tensor.begin for name, tensor in file.tensors.items()} == theirs
    for number, (name, block, num_bytes) in BLOCKS.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (name, (block, num_bytes))


def test_the_architecture_is_read_before_the_rest(good, tmp_path):
    assert gguf_architecture(good) == "llama"
    cut = write(tmp_path / "cut.gguf", [entry("general.architecture", STRING, text("bert"))], num_entries=60_000)
    assert gguf_architecture(cut) == "bert"
    nothing = write(tmp_path / "nothing.gguf", [entry("k", UINT32, struct.pack("<I", 1))])
    assert gguf_architecture(nothing) is None


def test_every_truncation_is_refused(good, tmp_path):
    data = good.read_bytes()
    path = tmp_path / "cut.gguf"
    end = max(tensor.begin + tensor.num_bytes for tensor in read_gguf(good).tensors.values())
    for length in range(end):
        path.write_bytes(data[:length])
        with pytest.raises(GGUFError):
            read_gguf(path)


LIES: dict[str, tuple[dict[str, Any], str]] = {
    "another file": ({"magic": b"PK\3\4"}, "magic"),
    "version 1": ({"version": 1}, "version"),
    "big-endian": ({"version": 3 << 24}, "little-endian"),
    "a billion entries": ({"num_entries": 10**9}, "number of metadata entries"),
    "2^60 entries": ({"num_entries": MUCH}, "number of metadata entries"),
    "2^63 tensors": ({"num_tensors": 1 << 63}, "number of tensors"),
    "entries that are not there": ({"num_entries": 60_000}, "cut off"),
    "a key of 2^60 bytes": ({"entries": [struct.pack("<Q", MUCH)]}, "length"),
    "a string of 2^60 bytes": ({"entries": [entry("k", STRING, struct.pack("<Q", MUCH))]}, "length"),
    "a string past the end": ({"entries": [entry("k", STRING, struct.pack("<Q", 1 << 20))]}, "cut off"),
    "2^60 numbers": ({"entries": [entry("k", ARRAY, array(UINT32, MUCH))]}, "number of elements"),
    "numbers past the end": ({"entries": [entry("k", ARRAY, array(UINT32, MAX_ELEMENTS))]}, "cut off"),
    "strings past the end": ({"entries": [entry("k", ARRAY, array(STRING, MAX_ELEMENTS))]}, "strings"),
    "arrays of arrays": ({"entries": [entry("k", ARRAY, array(ARRAY, 1, array(UINT32, 0)))]}, "type"),
    "an unknown kind": ({"entries": [entry("k", 99, b"")]}, "type"),
    "a key twice": ({"entries": [entry("k", UINT32, bytes(4))] * 2}, "each key once"),
    "no UTF-8": ({"entries": [entry("k", STRING, text(b"\xff\xfe"))]}, "UTF-8"),
    "alignment 0": ({"entries": [entry("general.alignment", UINT32, bytes(4))]}, "alignment"),
    "alignment 48": ({"entries": [entry("general.alignment", UINT32, struct.pack("<I", 48))]}, "power of two"),
    "no dimensions": ({"tensors": [tensor("t", [])]}, "dimensions"),
    "nine dimensions": ({"tensors": [tensor("t", [1] * 9)]}, "dimensions"),
    "2^32 dimensions": ({"tensors": [text("t") + b"\xff" * 4]}, "dimensions"),
    "a size of 2^62": ({"tensors": [tensor("t", [1 << 62, 4])]}, "size"),
    "sizes whose product overflows": ({"tensors": [tensor("t", [1 << 9] * 4)], "data": bytes(64)}, "cut off"),
    "a size of 0": ({"tensors": [tensor("t", [0, 4])]}, "sizes >= 1"),
    "half a block": ({"tensors": [tensor("t", [33], kind=8)], "data": bytes(64)}, "blocks of 32"),
    "an unknown type": ({"tensors": [tensor("t", [32], kind=77)]}, "F32, F16"),
    "an offset that overflows": ({"tensors": [tensor("t", [8], offset=(1 << 64) - 32)], "data": bytes(64)}, "cut off"),
    "an offset past the end": ({"tensors": [tensor("t", [8], offset=64)], "data": bytes(64)}, "cut off"),
    "a crooked offset": ({"tensors": [tensor("t", [8], offset=4)], "data": bytes(64)}, "multiple of 32"),
    "tensors that overlap": (
        {"tensors": [tensor("a", [16]), tensor("b", [8], offset=32)], "data": bytes(64)},
        "behind",
    ),
    "a tensor twice": ({"tensors": [tensor("a", [8]), tensor("a", [8], offset=32)], "data": bytes(64)}, "once"),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_refused_without_a_cost(lie, tmp_path):
    fields, named = LIES[lie]
    path = write(tmp_path / "model.gguf", **fields)
    tracemalloc.start()
    try:
        with pytest.raises(GGUFError, match=named) as caught:
            read_gguf(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.field.startswith("model.gguf")
    assert peak < 1 << 20, "bytes of memory"


def test_what_is_no_file_is_refused(tmp_path, monkeypatch):
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(GGUFError, match="empty"):
        read_gguf(tmp_path / "empty.gguf")
    with pytest.raises(GGUFError, match="readable"):
        read_gguf(tmp_path / "missing.gguf")
    circle = tmp_path / "circle.gguf"
    circle.symlink_to(circle)
    with pytest.raises(GGUFError, match="readable"):
        read_gguf(circle)
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(GGUFError, match="regular file"):
        read_gguf(tmp_path / "pipe.gguf")
    (tmp_path / "folder.gguf").mkdir()
    assert not is_gguf(tmp_path / "folder.gguf") and is_gguf(tmp_path / "Model.GGUF")
    monkeypatch.setattr("farsight.tokenization.gguf_file.MAX_ELEMENTS", 4000)
    words = array(STRING, 1001, struct.pack("<Q", 0) * 1001)
    path = write(tmp_path / "model.gguf", [entry(f"k{number}", ARRAY, words) for number in range(4)])
    with pytest.raises(GGUFError, match="number of elements"):
        read_gguf(path)  # many entries cannot do what one must not
