"""Everything that needs a GPU, as a ladder: ``python -m benchmarks.gpu_check``.

Imports first, then the tests of ``tests/gpu``, then the speeds of ``benchmarks.gpu_engine`` and the run of
``benchmarks.gpu_offline``. Each check is a process of its own, several at once; what measures or reads the device's
memory runs alone, at the end. No check that fails stops another, none begins when the time is up, and ``--json`` is
rewritten after each. Needs neither Ray nor a network, and of what development installs only pytest.

The exit status is 1 without a GPU or where a check failed; a target that is missed is shown. ``--device cpu`` tries
all of it without a GPU: the tests are skipped, and the speeds are those of a tiny model.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from farsight.engine.cuda import device_problem
from farsight.services.bench.report import markdown_table, provenance, write_json

TESTS = Path(__file__).parents[1] / "tests" / "gpu"

PYTEST = [
    *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull),
    *(f"--rootdir={TESTS}", "--noconftest", "-W", "ignore"),
]
"""Without the settings of the other tests, and so without the plugins that those need."""

IMPORTS = (
    *("torch", "triton", "xformers.ops", "llguidance", "benchmarks.gpu_engine", "farsight.engine.engine"),
    *("farsight.engine.attention.triton_attention", "farsight.engine.attention.xformers_attention"),
    *("farsight.engine.devices.model_device", "farsight.engine.sampling.draw_kernel"),
)

ALONE = ("no_growth", "pool_takes_what_is_left")
"""Tests that read the memory of the whole device, by parts of their names."""

LAST = ("no_growth", "compiled_layers")
"""Tests that take longest: behind the speeds."""

DECODE_SHARE, DECODE_UP_TO = 70.0, 64
"""Percent of the bandwidth limit that decode is to reach, up to so many sequences."""

PREFILL_SHARE = 50.0
"""Percent of the measured rate of matrix products."""

Row = tuple[str, str, str]
"""The check, its result and its figures."""

_SHOWN = 3000
"""Characters from the end of what a check wrote."""

_LEAST_S = 5.0
"""A check that has less time does not begin."""


@dataclass(frozen=True, slots=True)
class Check:
    """A command that passes with status 0.

    Attributes:
        alone: Whether nothing may run beside it.
    """

    name: str
    command: tuple[str, ...]
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a check ended: ``ok``, ``skipped``, ``failed``, ``cut off`` or ``no time``; the end of what it wrote."""

    result: str
    seconds: float = 0.0
    tail: str = ""

    @property
    def bad(self) -> bool:
        """Whether it counts against the whole."""
        return self.result in ("failed", "cut off")


class Ladder:
    """Runs checks within a time.

    Args:
        budget_s: Seconds for all of them.
        limit_s: Seconds for one, after which it is ended.
        jobs: Checks that run at once.
        keep: Is told how each ended, as it ends.
    """

    def __init__(self, budget_s: float, limit_s: float, jobs: int, keep: Callable[[Check, Outcome], None]) -> None:
        self._ends_at = time.monotonic() + budget_s
        self._limit_s = limit_s
        self._jobs = jobs
        self._keep = keep
        self._running: set[subprocess.Popen[str]] = set()

    def run(self, checks: Iterable[Check]) -> None:
        """Runs those that may run together, then the others in their order; an interrupt ends all."""
        checks = list(checks)
        with ThreadPoolExecutor(self._jobs) as pool:
            try:
                jobs = {pool.submit(self._one, check): check for check in checks if not check.alone}
                for job in as_completed(jobs):
                    self._keep(jobs[job], job.result())
                for check in checks:
                    if check.alone:
                        self._keep(check, self._one(check))
            except BaseException:
                self._ends_at = 0.0  # no other begins
                for process in list(self._running):
                    process.kill()
                raise

    def _one(self, check: Check) -> Outcome:
        left = self._ends_at - time.monotonic()
        if left < _LEAST_S:
            return Outcome("no time")
        began_at = time.monotonic()
        with subprocess.Popen(check.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            self._running.add(process)
            try:
                text, result = process.communicate(timeout=min(self._limit_s, left))[0], ""
            except subprocess.TimeoutExpired:
                process.kill()
                text, result = process.communicate()[0], "cut off"
            except BaseException:
                process.kill()
                raise
            finally:
                self._running.discard(process)
        result = result or ("failed" if process.returncode else "ok")
        if result == "ok" and re.search(r"\d skipped", text) and not re.search(r"\d passed", text):
            result = "skipped"
        return Outcome(result, round(time.monotonic() - began_at, 1), text[-_SHOWN:])


def imports() -> list[Check]:
    """Makes a check of each import: what is missing takes only what needs it."""
    return [Check(f"import {name}", (sys.executable, "-c", f"import {name}")) for name in IMPORTS]


def tests(expression: str | None) -> list[Check]:
    """Makes a check of each test of ``tests/gpu``; where they cannot be told, one that tells why.

    Args:
        expression: Selects some, as in pytest.
    """
    command = [*PYTEST, "--collect-only", *(["-k", expression] if expression else []), str(TESTS)]
    found = re.findall(
        r"^\S*?(test_\w+\.py::.+)$", subprocess.run(command, capture_output=True, text=True).stdout, re.M
    )
    if not found:
        return [Check("collect tests/gpu", tuple(command))]
    apart = (*ALONE, *LAST)
    return [
        Check(node.partition("::")[2], (*PYTEST, str(TESTS / node)), any(part in node for part in apart))
        for node in found
    ]


def speeds(device: str, directory: Path, *, compiled: bool) -> list[Check]:
    """Makes the measurements, which write what they find into ``directory``."""
    engine = [*(["--compile"] if compiled else []), *(["--shape", "tiny"] if device == "cpu" else [])]
    offline = ["--tiny", "--requests", "4", "--longest", "64"] if device == "cpu" else []
    return [
        Check(
            name,
            (
                sys.executable,
                "-m",
                f"benchmarks.{name}",
                "--device",
                device,
                "--json",
                f"{directory / name}.json",
                *more,
            ),
            alone=True,
        )
        for name, more in (("gpu_engine", engine), ("gpu_offline", offline))
    ]


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
    for each in record["steps"]:
        figures = f"{each['step ms']:.1f} ms, {each['kernels ms']:.1f} ms of it kernels"
        rows += [(each["step"], "measured", figures)]
    return rows


def _against(share: float, target: float | None, figures: str) -> tuple[str, str]:
    if target is None:
        return "measured", figures
    return "ok" if share >= target else "off", f"{figures} (target {target:.0f} %)"


def table(rows: Sequence[Row]) -> str:
    """For people."""
    return markdown_table(["check", "result", "figures"], [list(row) for row in rows])


def offline_rows(record: dict[str, Any]) -> list[Row]:
    """Shows the figures of ``gpu_offline``."""
    figures = (
        f"{record['tokens/s']:,.0f} tokens/s, again {record['again tokens/s']:,.0f}, {record['compiles']} compiles"
    )
    return [("offline run", "measured", figures)]


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--budget", type=float, default=540, help="seconds for everything")
    parser.add_argument("--limit", type=float, default=180, help="seconds for one check")
    parser.add_argument("--jobs", type=int, default=8, help="checks that run at once")
    parser.add_argument("--no-speed", action="store_true", help="only imports and tests")
    parser.add_argument("--compile", action="store_true", help="measure the speeds with ``engine.compile``")
    parser.add_argument("--json", type=Path, help="also write everything there")
    parser.add_argument("-k", metavar="EXPRESSION", help="only the tests that pytest selects by this")
    arguments = parser.parse_args()
    problem = device_problem() if arguments.device == "cuda" else None
    if problem is not None:
        print(f"nothing was checked: {problem}", file=sys.stderr)
        return 1
    outcomes: dict[str, Outcome] = {}
    origin = provenance(["python", "-m", "benchmarks.gpu_check"])
    began_at = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:

        def measured() -> dict[str, Any]:
            return {each.stem: json.loads(each.read_text("utf-8")) for each in sorted(Path(directory).glob("*.json"))}

        def keep(check: Check, outcome: Outcome) -> None:
            outcomes[check.name] = outcome
            print(f"{outcome.result:8} {outcome.seconds:6.1f} s  {check.name}", flush=True)
            if outcome.bad:
                print(outcome.tail, flush=True)
            checks = {name: asdict(each) for name, each in outcomes.items()}
            elapsed_s = round(time.monotonic() - began_at, 1)
            write_json(arguments.json, {**origin, "elapsed_s": elapsed_s, "checks": checks, "speeds": measured()})

        checks = [*imports(), *tests(arguments.k)]
        if not arguments.no_speed:
            last = [check for check in checks if any(part in check.name for part in LAST)]
            checks = [check for check in checks if check not in last]
            checks += [*speeds(arguments.device, Path(directory), compiled=arguments.compile), *last]
        interrupted = False
        try:
            Ladder(arguments.budget, arguments.limit, arguments.jobs, keep).run(checks)
        except KeyboardInterrupt:
            interrupted = True
        rows = [(name, each.result, f"{each.seconds:.1f} s") for name, each in outcomes.items()]
        found = measured()
        rows += speed_rows(found["gpu_engine"]) if "gpu_engine" in found else []
        rows += offline_rows(found["gpu_offline"]) if "gpu_offline" in found else []
    print(f"\n{table(rows)}")
    return int(interrupted or any(each.bad for each in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
