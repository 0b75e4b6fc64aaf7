"""The run file that ``farsight serve`` writes for each port; only its user's other commands can read it."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from farsight.core.config.server import is_loopback
from farsight.core.errors import FarsightError

ADMIN_TOKEN_VARIABLE = "FARSIGHT_ADMIN_TOKEN"
"""Environment variable with the admin token, for the processes of a service and its clients."""


def run_directory() -> Path:
    """``$XDG_RUNTIME_DIR/farsight``, else a directory of this user among the temporary files."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "farsight"
    return Path(tempfile.gettempdir()) / f"farsight-{os.getuid()}"


def make_run_directory() -> Path:
    """Creates ``run_directory`` for this user alone if it is missing.

    Raises:
        FarsightError: The directory belongs to another user.
        OSError: The directory cannot be created.
    """
    directory = run_directory()
    directory.mkdir(mode=0o700, exist_ok=True)
    _check_owner(directory)
    return directory


@contextlib.contextmanager
def published(port: int, admin_token: str, tls_cert: str = "") -> Iterator[Path]:
    """The run file of the server on that port, for as long as the context lasts.

    Args:
        tls_cert: File of the server's certificate chain; empty without TLS.

    Raises:
        FarsightError: The directory belongs to another user, or cannot be written to.
    """
    path = _path(port)
    try:
        make_run_directory()
        path.unlink(missing_ok=True)  # The file of a killed server.
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump({"pid": os.getpid(), "admin_token": admin_token, "tls_cert": tls_cert}, file)
    except OSError as error:
        raise FarsightError(f"{path} cannot be written: {error.strerror}; set XDG_RUNTIME_DIR") from error
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class RunFile:
    """What a server of this user has published.

    Attributes:
        written_at: Seconds since the epoch; its process is older.
        uses_tls: Whether it speaks HTTPS.
    """

    port: int
    pid: int
    written_at: float
    uses_tls: bool


def run_files() -> list[RunFile]:
    """Returns the run files of this user's servers by port, also of servers that have been killed.

    Raises:
        FarsightError: The directory belongs to another user.
    """
    directory = run_directory()
    if not directory.exists():
        return []
    _check_owner(directory)
    found = []
    for path in directory.glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # it goes just now, or is no run file
            fields = json.loads(path.read_text("utf-8"))
            found.append(RunFile(int(path.stem), int(fields["pid"]), path.stat().st_mtime, bool(fields["tls_cert"])))
    return sorted(found, key=lambda each: each.port)


def find_admin_token(port: int, host: str = "127.0.0.1") -> str:
    """The admin token from the environment, else from the run file of the port; empty if there is none.

    Args:
        host: Address of the server; the run file's token is for no other machine.

    Raises:
        FarsightError: The run file's directory belongs to another user.
    """
    return os.environ.get(ADMIN_TOKEN_VARIABLE) or _published_value(port, host, "admin_token")


def find_tls_cert(port: int, host: str) -> str:
    """The certificate file of a server on this machine that speaks TLS; empty for every other server.

    Raises:
        FarsightError: The run file's directory belongs to another user.
    """
    return _published_value(port, host, "tls_cert")


def _published_value(port: int, host: str, name: str) -> str:
    if not is_loopback(host):
        return ""
    path = _path(port)
    try:
        _check_owner(path.parent)
        return str(json.loads(path.read_text("utf-8"))[name])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _path(port: int) -> Path:
    return run_directory() / f"{port}.json"


def _check_owner(directory: Path) -> None:
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise FarsightError(
            f"{directory} is not a directory of this user alone (0700); remove it or set XDG_RUNTIME_DIR"
        )
