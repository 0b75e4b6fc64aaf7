"""Everything that needs a GPU, in one table: ``python -m benchmarks.gpu_check``.

Needs neither Ray nor a network, and of what development installs only pytest.

The tests of ``tests/gpu``, then the speeds of ``benchmarks.gpu_engine`` beside their targets, these in a process of
their own: a test may break the GPU for the process that it ran in. Every result is printed as it comes, the table at
the end, also after an interrupt (SIGINT). The exit status is that of the tests, and 1 without a GPU or if the speeds
could not be measured; a target that is missed is shown.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from farsight.engine.cuda import device_problem, is_lost
from farsight.services.bench.report import markdown_table

TESTS = Path(__file__).parents[1] / "tests" / "gpu"

ALONE = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={TESTS}", "--noconftest", "-W", "ignore"]
"""Without the settings of the other tests, and so without the plugins that those need."""

DECODE_SHARE, DECODE_UP_TO = 70.0, 64
"""Percent of the bandwidth limit that decode is to reach, up to so many sequences."""

PREFILL_SHARE = 50.0
"""Percent of the measured rate of matrix products."""

Row = tuple[str, str, str]
"""The check, its result and its figures."""


_SHOWN_OF_ERROR = 3000
"""Characters from the end of a failed test's traceback."""


class Outcomes:
    """A pytest plugin that keeps how each test ended, and tells it at once. A GPU that is lost ends the tests."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._session: pytest.Session | None = None

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Setup and teardown count only if they end a test."""
        if report.when != "call" and report.passed:
            return
        name = report.nodeid.partition("::")[2].removeprefix("test_").replace("_", " ")
        reason = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else ""
        self.rows.append((name, report.outcome, reason or f"{report.duration:.1f} s"))
        print(f"\n{' | '.join(self.rows[-1])}", flush=True)
        if report.failed:
            print(report.longreprtext[-_SHOWN_OF_ERROR:], flush=True)
            if self._session is not None and device_problem() is None and is_lost():
                self._session.shouldstop = "the GPU is lost for this process"


def speed_rows(record: dict[str, Any]) -> list[Row]:
    """The figures of ``gpu_engine.run``, as far as it came, each beside its target if it has one."""
    rows: list[Row] = []
    for each in record["decode"]:
        share = each["share of limit %"]
        target = DECODE_SHARE if each["sequences"] <= DECODE_UP_TO else None
        figures = f"{each['tokens/s']:,.0f} tokens/s, {share:.0f} % of the bandwidth limit"
        rows.append((f"decode, {each['sequences']} sequences", *_against(share, target, figures)))
    for each in record["prefill"]:
        share = each["share of matmul %"]
        figures = f"{each['tokens/s']:,.0f} tokens/s, {share:.0f} % of the matrix products' rate"
        rows.append((f"prefill, {each['tokens']} tokens", *_against(share, PREFILL_SHARE, figures)))
    for each in record["swap"]:
        for way, share in (("offload", each["of the link %"]), ("upload", each["of the link, up %"])):
            rows.append((way, "measured", f"{each[f'{way} GB/s']:.1f} GB/s, {share:.0f} % of the link"))
        rows.append(("offload beside decode", "measured", f"{each['overlap %']:.0f} % of the shorter is hidden"))
    return rows


def _against(share: float, target: float | None, figures: str) -> tuple[str, str]:
    if target is None:
        return "measured", figures
    return "ok" if share >= target else "off", f"{figures} (target {target:.0f} %)"


def table(rows: Sequence[Row]) -> str:
    """For people."""
    return markdown_table(["check", "result", "figures"], [list(row) for row in rows])


def measure_speeds(*, compiled: bool, path: Path | None) -> list[Row]:
    """Runs ``benchmarks.gpu_engine``; what it has measured, and whether it came to its end.

    Args:
        path: Where its record is to stay.
    """
    with tempfile.TemporaryDirectory() as directory:
        record = path or Path(directory) / "speeds.json"
        record.unlink(missing_ok=True)
        command = [sys.executable, "-m", "benchmarks.gpu_engine", "--json", str(record)]
        rows: list[Row] = []
        try:
            status = subprocess.run([*command, *(["--compile"] if compiled else [])]).returncode
        except KeyboardInterrupt:
            rows.append(("speeds", "interrupted", ""))
        else:
            if status:
                rows.append(("speeds", "failed", f"exit status {status}"))
        measured = speed_rows(json.loads(record.read_text("utf-8"))) if record.exists() else []
    return measured + rows


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-speed", action="store_true", help="only the tests")
    parser.add_argument("--compile", action="store_true", help="measure the speeds with ``engine.compile``")
    parser.add_argument("--json", type=Path, help="also write the speeds there")
    parser.add_argument("-k", metavar="EXPRESSION", help="only the tests that pytest selects by this")
    arguments = parser.parse_args()
    problem = device_problem()
    if problem is not None:
        print(f"nothing was checked: {problem}", file=sys.stderr)
        return 1
    outcomes = Outcomes()
    selected = ["-k", arguments.k] if arguments.k else []
    status = int(pytest.main([*ALONE, *selected, str(TESTS)], plugins=[outcomes]))
    speeds: list[Row] = []
    if not arguments.no_speed and status != pytest.ExitCode.INTERRUPTED:
        speeds = measure_speeds(compiled=arguments.compile, path=arguments.json)
    print(f"\n{table([*outcomes.rows, *speeds])}")
    return status or int(any(row[0] == "speeds" for row in speeds))


if __name__ == "__main__":
    sys.exit(main())
