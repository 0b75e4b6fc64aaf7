"""The threads of the compiled step: each task runs once, and nothing hangs or is left over."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from engine.native.library import COMPILE_FLAGS

HERE = Path(__file__).parent
CASES = ("once", "crowded", "sleeps", "throws", "leaves_no_thread", "forks", "signals", "refused")
GUARD_S = 300

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("team") / "team_check"
    flags = [flag for flag in COMPILE_FLAGS if flag != "-O3"]
    subprocess.run(["c++", *flags, "-O1", str(HERE / "team_check.cpp"), "-o", str(built)], check=True)
    return built


@pytest.mark.parametrize("case", CASES)
def test_team(program: Path, case: str) -> None:
    done = subprocess.run([program, case], capture_output=True, text=True, timeout=GUARD_S, check=False)
    assert done.returncode == 0, done.stderr


def test_a_stopped_process_goes_on(program: Path) -> None:
    """SIGSTOP in the middle of jobs, several times."""
    with subprocess.Popen([program, "once"], stderr=subprocess.PIPE, text=True) as process:
        for _ in range(5):
            if process.poll() is None:
                process.send_signal(signal.SIGSTOP)
                time.sleep(0.01)
                process.send_signal(signal.SIGCONT)
                time.sleep(0.01)
        _, problem = process.communicate(timeout=GUARD_S)
    assert process.returncode == 0, problem
