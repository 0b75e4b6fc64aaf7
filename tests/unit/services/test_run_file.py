"""The run file: its owner alone reads it, and it goes with the server."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from farsight.core.errors import FarsightError
from farsight.services.commands.ask import key_for
from farsight.services.run_file import ADMIN_TOKEN_VARIABLE, find_admin_token, find_tls_cert, published, run_directory
from farsight.services.server_address import server_url


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv(ADMIN_TOKEN_VARIABLE, raising=False)
    return tmp_path / "farsight"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_token_is_found_while_the_server_runs(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with published(8000, "secret") as path:
        assert path == runtime / "8000.json"
        assert (mode(path), mode(runtime)) == (0o600, 0o700)
        assert (find_admin_token(8000), find_admin_token(8001)) == ("secret", "")
        with monkeypatch.context() as patch:
            patch.setenv(ADMIN_TOKEN_VARIABLE, "other")
            assert find_admin_token(8000) == "other", "the environment comes first"
    assert find_admin_token(8000) == ""
    assert not path.exists()


def test_the_file_of_a_killed_server_is_replaced(runtime: Path) -> None:
    runtime.mkdir(mode=0o700)
    (runtime / "8000.json").write_text("{}")
    assert find_admin_token(8000) == ""
    with published(8000, "secret") as path:
        assert (find_admin_token(8000), mode(path)) == ("secret", 0o600)


@pytest.mark.parametrize("kind", ["open", "link", "of another user"])
def test_a_directory_that_others_can_change_is_refused(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if kind == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        runtime.symlink_to(tmp_path / "elsewhere")
    else:
        runtime.mkdir()
        runtime.chmod(0o777 if kind == "open" else 0o700)
    if kind == "of another user":
        monkeypatch.setattr(os, "getuid", lambda: runtime.stat().st_uid + 1)
    with pytest.raises(FarsightError, match="not a directory of this user alone"), published(8000, "secret"):
        pass
    with pytest.raises(FarsightError, match="not a directory of this user alone"):
        find_admin_token(8000)


@pytest.mark.parametrize("value", ["", "/nonexistent"])
def test_without_a_runtime_directory_it_lies_among_the_temporary_files(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", value)
    assert run_directory() == Path(tempfile.gettempdir()) / f"farsight-{os.getuid()}"


def test_what_a_server_here_has_published_goes_to_no_other_machine() -> None:
    with published(8000, "secret", "/chain.pem"):
        assert (find_admin_token(8000, "127.0.0.2"), find_tls_cert(8000, "localhost")) == ("secret", "/chain.pem")
        assert (find_admin_token(8000, "example.org"), find_tls_cert(8000, "10.0.0.1")) == ("", "")
        assert key_for("http://127.0.0.1:8000", None) == key_for("http://localhost:8000", None) == "secret"
        assert (key_for("http://example.org:8000", None), key_for("http://127.0.0.1:8000", "given")) == ("", "given")
        assert server_url("127.0.0.1", 8000) == "https://127.0.0.1:8000"
        assert server_url("example.org", 8000) == "http://example.org:8000"
        assert server_url("https://example.org", 8000) == "https://example.org:8000"
        assert server_url("::1", 8001) == "http://[::1]:8001"
