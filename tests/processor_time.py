"""Processor seconds of every test file, the budget that they keep, and the guard that ends what tests leave running.

``--processor-seconds FILE`` writes the table as JSON. ``--budget FILE`` fails a run that takes more than 5 % above the
budget's ``total``, or in which a file takes more than 20 s that the budget does not list. Its seconds are of one
machine; how much slower this one is, a yardstick says that runs now and then beside the tests.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

MARK = "FARSIGHT_TESTS"
"""The environment variable by which a guard knows what its tests have started."""

GUARD = Path(__file__).with_name("guard.py")
NUM_SHOWN = 25
SLACK = 1.05
LARGE_S = 20.0
"""Processor seconds above which a file must be listed in the budget."""

YARDSTICK_EVERY = 100
"""Tests between two runs of the yardstick."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processor-seconds", metavar="FILE", help="write processor seconds by test file, as JSON")
    parser.addoption("--budget", metavar="FILE", help="fail where the tests take more processor seconds than it says")


def pytest_configure(config: pytest.Config) -> None:
    controls = bool(getattr(config.option, "numprocesses", 0)) and not hasattr(config, "workerinput")
    config.pluginmanager.register(Accountant(config, controls), "accountant")


def yardstick_s() -> float:
    """Returns the processor seconds of a fixed piece of work: dictionaries, numbers and strings, as most tests do."""
    began = time.process_time()
    found = {str(number): number * number % 7 for number in range(40_000)}
    assert sum(sorted(found.values())[:1000]) == 0
    return time.process_time() - began


def over_budget(budget: dict[str, Any], seconds: Mapping[str, float], slowness: float) -> list[str]:
    """Returns one line for each rule of the budget that the tests break.

    Args:
        budget: ``total``, processor seconds, and ``large``, the files that may take over 20 s.
        seconds: What each file has taken.
        slowness: By how much longer the yardstick took than on the machine of the budget.
    """
    total, lines = sum(seconds.values()) / slowness, []
    if total > SLACK * budget["total"]:
        lines.append(f"all tests: {total:.0f} processor seconds, budget {budget['total']:g} and 5 % above it")
    for file, taken in seconds.items():
        if taken / slowness > LARGE_S and file not in (*budget["large"], "collection"):
            lines.append(
                f"{file}: {taken / slowness:.1f} processor seconds, {LARGE_S:g} allowed where it is not listed"
            )
    return lines


class Accountant:
    """Tells the guard of this process which file its tests are of, and gathers the tables of all processes.

    Args:
        controls: This process starts others that run the tests.
    """

    def __init__(self, config: pytest.Config, controls: bool) -> None:
        self._config, self._file, self._seconds = config, "", Counter[str]()
        self._is_worker = hasattr(config, "workerinput")
        self._yardsticks: list[float] = []
        self._num_reports = 0
        self._broken: list[str] = []
        mark = os.environ[MARK] = uuid.uuid4().hex
        command = [sys.executable, "-I", "-S", str(GUARD), str(os.getpid()), f"{MARK}={mark}"]
        self._guard = subprocess.Popen(
            [*command, "alone"] if controls else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={},
            start_new_session=True,
        )

    def _say(self, line: str) -> None:
        assert self._guard.stdin is not None
        self._guard.stdin.write(line + "\n")
        self._guard.stdin.flush()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, location: tuple[str, int | None, str]) -> None:
        if self._config.pluginmanager.has_plugin("dsession"):
            return  # the controlling process hears of every test, and runs none
        if location[0] != self._file:
            self._file = location[0]
            self._say(f"file {self._file}")

    def pytest_runtest_logfinish(self) -> None:
        if not self._is_worker and self._config.getoption("budget") and self._num_reports % YARDSTICK_EVERY == 0:
            self._yardsticks.append(yardstick_s())
        self._num_reports += 1

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._say("table")
        assert self._guard.stdout is not None
        self._seconds.update(json.loads(self._guard.stdout.readline()))
        if self._is_worker:
            self._config.workeroutput["processor_seconds"] = dict(self._seconds)  # type: ignore[attr-defined]
            return
        if path := self._config.getoption("processor_seconds"):
            Path(path).write_text(json.dumps(dict(self._seconds.most_common()), indent=1) + "\n")
        if (path := self._config.getoption("budget")) and self._yardsticks:
            budget = json.loads(Path(path).read_text())
            self._broken = over_budget(budget, self._seconds, self._slowness(budget))
            if self._broken and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _slowness(self, budget: dict[str, Any]) -> float:
        """At least 1: on a faster machine the budget stays what it is."""
        return max(1.0, statistics.median(self._yardsticks) / float(budget["yardstick_s"]))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._seconds.update(getattr(node, "workeroutput", {}).get("processor_seconds", {}))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section(f"processor seconds: {sum(self._seconds.values()):.0f}")
        for file, seconds in self._seconds.most_common(NUM_SHOWN if not self._yardsticks else None):
            terminalreporter.write_line(f"{seconds:8.1f}  {file}")
        if self._yardsticks:
            terminalreporter.write_line(f"yardstick: {statistics.median(self._yardsticks):.4f} s")

    def pytest_unconfigure(self) -> None:
        for line in self._broken:  # last of all, where the reason of a failure is looked for
            sys.stdout.write(f"OVER BUDGET  {line}\n")
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait()
        assert self._guard.stdout is not None
        self._guard.stdout.close()
