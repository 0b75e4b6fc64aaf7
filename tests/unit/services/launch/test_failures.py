"""What the processes of a service say: lines, whole and without words of clients; a failure as a line, a second one and
a file where there is more to know, and no traceback."""

from __future__ import annotations

import json
import logging
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from farsight.actors.runtime.log_lines import MAX_LINE, LineHandler, send_log_lines, send_no_log_lines
from farsight.actors.runtime.names import RUN_DIR_VARIABLE
from farsight.core.errors import ConfigError, FarsightError
from farsight.services.launch.failures import describe, failing_in_lines, in_format, printed_log_lines, write_log
from farsight.services.launch.stages import StartTimedOut


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


logger = logging.getLogger("farsight.services.a_test")


class Lines(list[str]):
    """What was printed; ``last`` waits for so many lines."""

    def __init__(self) -> None:
        self._more = threading.Semaphore(0)

    def show(self, line: str) -> None:
        self.append(line)
        self._more.release()

    def last(self) -> str:
        assert self._more.acquire(timeout=120)
        return self[-1]


@pytest.fixture
def directory() -> Iterator[Path]:
    """One with a short name: addresses of sockets have 107 characters at most."""
    with tempfile.TemporaryDirectory(prefix="farsight-") as name:
        yield Path(name)


@pytest.fixture
def lines(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lines]:
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(directory))
    found = Lines()
    with printed_log_lines(directory, found.show):
        yield found
    send_no_log_lines()


def test_a_line_of_json_names_process_logger_and_fields(lines: Lines) -> None:
    send_log_lines("worker-0", "json")
    logger.warning("two of %d are late", 3, extra={"fields": {"request_id": "cmpl-1"}})
    found = json.loads(lines.last())
    assert found.pop("at").endswith("+00:00")
    assert found == {
        "level": "warning",
        "process": "worker-0",
        "logger": "farsight.services.a_test",
        "message": "two of 3 are late",
        "request_id": "cmpl-1",
    }


def test_an_exception_is_told_by_type_and_place_and_not_by_its_words(lines: Lines) -> None:
    send_log_lines("ingress-1", "json")
    try:
        raise ValueError("my prompt")
    except ValueError:
        logger.exception("a request failed")
    assert "my prompt" not in lines.last()
    found = json.loads(lines[-1])
    assert (found["exception"], found["raised_at"].split(":")[0]) == ("ValueError", "test_failures.py")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_hostile_message_stays_one_line_and_no_terminal_obeys_it(lines: Lines, log_format: str) -> None:
    send_log_lines("ingress-1", log_format)
    logger.warning("a\nb \x1b[31m %s", "x" * 2 * MAX_LINE)
    assert lines.last().isprintable()
    assert len(lines[-1]) <= MAX_LINE


def test_a_second_call_replaces_the_first(lines: Lines) -> None:
    send_log_lines("first", "text")
    send_log_lines("second", "text")
    logger.warning("once")
    logger.warning("twice")
    lines.last()
    lines.last()
    assert [line.split(" warning ")[1] for line in lines] == ["second: once", "second: twice"]


def test_lines_without_a_reader_are_counted_and_nothing_waits(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(directory))
    handler, found = LineHandler("worker-0", "json", directory), Lines()
    record = logging.LogRecord("farsight.services.a_test", logging.WARNING, "", 0, "m", None, None)
    for _ in range(2):
        handler.emit(record)
    with printed_log_lines(directory, found.show):
        handler.emit(record)
        handler.emit(record)
        found.last()
        found.last()
    assert [json.loads(line).get("lost") for line in found] == [2, None]
    handler.close()


def test_lines_of_a_start_are_json_too() -> None:
    said: list[str] = []
    in_format(said.append, "text")("Ready.")
    in_format(said.append, "json")("Ready.")
    assert said[0] == "Ready."
    assert json.loads(said[1])["message"] == "Ready."
