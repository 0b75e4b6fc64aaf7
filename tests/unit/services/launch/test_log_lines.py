"""Lines of several processes come out of one, whole, and hold no words of clients."""

from __future__ import annotations

import json
import logging
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.runtime.log_lines import MAX_LINE, LineHandler, send_log_lines, send_no_log_lines
from actors.runtime.names import RUN_DIR_VARIABLE
from services.launch.log_lines import in_format, printed_log_lines

logger = logging.getLogger("services.a_test")


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
        "logger": "services.a_test",
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
    assert (found["exception"], found["raised_at"].split(":")[0]) == ("ValueError", "test_log_lines.py")


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
    record = logging.LogRecord("services.a_test", logging.WARNING, "", 0, "m", None, None)
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
