"""Model directories are data from elsewhere: what lies about itself is refused before any of it is read."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from farsight.core.errors import InvalidValueError
from farsight.engine.checkpoint.check import check_checkpoint
from farsight.engine.checkpoint.config_fields import CheckpointError
from farsight.engine.checkpoint.model_config import load_model_config
from farsight.engine.checkpoint.stored import MAX_HEADER, read_header
from farsight.tokenization.model_dir import MAX_TEXT, read_json_file
from farsight.tokenization.model_files import load_model_texts
from tests.unit.engine.small_models import SHAPES, save_model

FILE = "model.safetensors"
MUCH = 1 << 60


def header(path: Path, entries: Any, data: bytes = b"", length: int | None = None) -> Path:
    raw = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


LIES: dict[str, dict[str, Any]] = {
    "2^60 bytes of header": {"entries": {}, "length": MUCH},
    "2^63 bytes of header": {"entries": {}, "length": 1 << 63},
    "a header past the end": {"entries": {}, "length": 3},
    "no JSON": {"entries": b"{{{"},
    "no UTF-8": {"entries": b'{"\xff": 1}'},
    "no object": {"entries": []},
    "a deep header": {"entries": b"[" * 100_000},
    "a tensor that is no object": {"entries": {"a": 3}},
    "an unknown type": {"entries": {"a": entry("F4")}, "data": bytes(8)},
    "a type that is a list": {"entries": {"a": entry([])}, "data": bytes(8)},
    "a shape that is no list": {"entries": {"a": entry(shape=2)}, "data": bytes(8)},
    "a negative size": {"entries": {"a": entry(shape=[-2])}, "data": bytes(8)},
    "a size of 2^62": {"entries": {"a": entry(shape=[1 << 62, 4])}, "data": bytes(8)},
    "many sizes": {"entries": {"a": entry(shape=[1] * 100_000)}, "data": bytes(8)},
    "a size that is true": {"entries": {"a": entry(shape=[True, 2])}, "data": bytes(8)},
    "offsets that overflow": {"entries": {"a": entry(offsets=[1 << 63, (1 << 63) + 8])}, "data": bytes(8)},
    "offsets in reverse": {"entries": {"a": entry(offsets=[8, 0])}, "data": bytes(8)},
    "offsets past the end": {"entries": {"a": entry(shape=[4], offsets=[0, 16])}, "data": bytes(8)},
    "another number of bytes": {"entries": {"a": entry(shape=[1])}, "data": bytes(8)},
    "an overlap": {"entries": {"a": entry(), "b": entry(offsets=[4, 12])}, "data": bytes(12)},
    "the same bytes": {"entries": {"a": entry(), "b": entry()}, "data": bytes(8)},
    "a gap": {"entries": {"a": entry(offsets=[8, 16])}, "data": bytes(16)},
    "bytes of no tensor": {"entries": {"a": entry()}, "data": bytes(9)},
}


@pytest.mark.parametrize("lie", LIES)
def test_headers_that_lie_are_refused_without_a_cost(lie, tmp_path):
    path = header(tmp_path / FILE, **LIES[lie])
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=FILE):
            read_header(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * (1 << 20), "bytes of memory, for at most 300 kB of header"


def test_a_header_may_be_no_longer_than_its_limit(tmp_path):
    path = tmp_path / FILE
    with path.open("wb") as file:
        file.write((MAX_HEADER + 1).to_bytes(8, "little"))
        file.truncate(MAX_HEADER + 100)
    with pytest.raises(CheckpointError, match="at most"):
        read_header(path)
    path.write_bytes(b"\x01")
    with pytest.raises(CheckpointError):
        read_header(path)


@pytest.fixture
def directory(tiny_model_dir: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_model_dir, tmp_path / "model")


def test_every_truncation_is_refused(directory):
    config = load_model_config(directory)
    check_checkpoint(directory, config)
    data = (directory / FILE).read_bytes()
    for length in [*range(64), *range(64, len(data), len(data) // 60), len(data) - 1]:
        (directory / FILE).write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=FILE):
            check_checkpoint(directory, config)


TEXTS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
FILES = (FILE, *TEXTS)


def use(directory: Path) -> None:
    """All that reads a directory before anything starts."""
    load_model_texts(directory)
    check_checkpoint(directory, load_model_config(directory))


def link_out(path: Path) -> None:
    outside = path.parents[1] / "outside"
    outside.write_text("{}")
    path.symlink_to(outside)


ODD_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a link out of the directory": (link_out, "in the model directory"),
    "a link to itself": (lambda path: path.symlink_to(path), r"circle|symbolic links"),
    "a link to nothing": (lambda path: path.symlink_to(path.parent / "nothing"), "a link to a file that exists"),
    "a pipe": (os.mkfifo, "a regular file"),
    "a folder": (Path.mkdir, "a regular file"),
}


@pytest.mark.parametrize("kind", ODD_FILES)
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_of_the_directory_is_refused(name, kind, directory):
    make, message = ODD_FILES[kind]
    (directory / name).unlink(missing_ok=True)
    make(directory / name)
    with pytest.raises(InvalidValueError, match=message) as caught:
        use(directory)
    assert caught.value.field == f"model: {name}"


def test_links_inside_and_in_the_cache_of_the_hub_are_followed(directory, tmp_path):
    (directory / FILE).rename(directory / "weights")
    (directory / FILE).symlink_to("weights")
    use(directory)
    snapshot = tmp_path / "models--a--b" / "snapshots" / "123"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in directory.iterdir():
        shutil.copy(file, blobs / file.name)
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    use(snapshot)
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(directory / "config.json")
    with pytest.raises(InvalidValueError, match="in the model directory"):
        use(snapshot)


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/etc/passwd", "sub/a.safetensors", 3, None, ["a"]])
def test_an_index_names_files_of_its_directory(shard, directory):
    index = {"weight_map": {"model.norm.weight": shard}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="weight_map"):
        check_checkpoint(directory, load_model_config(directory))


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    save_model(tmp_path, max_shard_size="100KB", **SHAPES["gqa"])
    first = min(tmp_path.glob("model-*.safetensors"))
    shutil.copy(first, tmp_path / "again.safetensors")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    index["weight_map"]["again"] = "again.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="one file"):
        check_checkpoint(tmp_path, load_model_config(tmp_path))


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_texts_are_bounded_and_may_not_be_nested_deeply(name, directory):
    (directory / name).write_text("[" * 200_000)
    with pytest.raises(InvalidValueError, match="a JSON file"):
        use(directory)
    with (directory / name).open("w") as file:
        file.truncate(MAX_TEXT + 1)
    with pytest.raises(InvalidValueError, match="at most"):
        use(directory)
    (directory / name).write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidValueError, match="UTF-8"):
        read_json_file(directory / name)


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_hidden_layers", 10**9), ("vocab_size", 10**18), ("hidden_size", 1 << 40), ("intermediate_size", 1 << 62)],
)
def test_absurd_sizes_are_refused_at_once(field, value, directory):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(InvalidValueError, match=field):
        load_model_config(directory)


@pytest.mark.parametrize("templates", [[3], [{"name": "default"}], [{"name": [], "template": "x"}], {"a": 1}, 7])
def test_odd_lists_of_templates_are_no_templates(templates, directory):
    settings = {"chat_template": templates}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_model_texts(directory).template is None
