"""Every failure of a command: a line, a second one and a file where there is more to know, and no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from core.errors import ConfigError, FarsightError
from services.launch.failures import describe, failing_in_lines, write_log
from services.launch.stages import StartTimedOut


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "farsight"


def fail(error: Exception, cause: Exception | None = None) -> None:
    with failing_in_lines("serve"):
        raise error from cause


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    out, err = capsys.readouterr()
    assert not out
    return err.splitlines()


@pytest.mark.parametrize(
    ("error", "what", "todo"),
    [
        (ConfigError("server.port", 80, "a free one"), "server.port: got 80, expected a free one", None),
        (
            ConfigError("model", "/m", "a directory that exists"),
            "model: got '/m', expected a directory that exists",
            None,
        ),
        (FarsightError("two\nlines"), "two lines", None),
        (StartTimedOut("Ray: not ready"), "Ray: not ready", "end other programs, or raise server.start_patience_s"),
        (FarsightError("x" * 1000), "x" * 397 + "...", None),
    ],
)
def test_a_second_line_only_says_what_the_first_one_does_not(
    capsys: pytest.CaptureFixture[str], runtime: Path, error: Exception, what: str, todo: str | None
) -> None:
    with pytest.raises(typer.Exit) as end:
        fail(error)
    assert end.value.exit_code == 1
    first, *more = shown(capsys)
    assert first == f"farsight: {what}"
    assert len(more) == (0 if todo is None else 1)
    assert todo is None or more[0].startswith(f"farsight: What to do: {todo}")
    assert not runtime.exists()


@pytest.mark.parametrize("error", [TimeoutError("HTTP proxies not available after 60s."), FarsightError("it failed")])
def test_the_rest_is_in_a_file_of_this_user(
    capsys: pytest.CaptureFixture[str], runtime: Path, error: Exception
) -> None:
    cause = RuntimeError("a cause")
    cause.add_note("the last line of a log")
    for _ in range(2):  # the second failure takes the place of the first
        with pytest.raises(typer.Exit):
            fail(error, cause)
    first, second = shown(capsys)[-2:]
    assert str(error) in first
    path = runtime / "failed-serve.log"
    assert second.endswith(f"read the details of the failure in {path}.")
    assert path.stat().st_mode & 0o077 == 0
    text = path.read_text("utf-8")
    assert "Traceback" in text and "a cause" in text and "the last line of a log" in text


def test_a_link_in_the_place_of_the_file_is_not_followed(runtime: Path, tmp_path: Path) -> None:
    runtime.mkdir(mode=0o700)
    other = tmp_path / "other"
    (runtime / "failed-serve.log").symlink_to(other)
    assert write_log("serve", "text") == runtime / "failed-serve.log"
    assert not other.exists()


def test_where_no_file_can_be_written_the_line_remains(runtime: Path) -> None:
    runtime.mkdir(mode=0o777)
    runtime.chmod(0o777)  # of others as well: nothing is written there
    assert write_log("serve", "text") is None
    assert describe(ValueError("odd"), "serve", write_log) == ["serve ended by an unexpected ValueError: odd"]


def test_what_the_command_means_to_end_with_passes() -> None:
    with pytest.raises(typer.Exit) as end, failing_in_lines("batch"):
        raise typer.Exit(130)
    assert end.value.exit_code == 130
