"""xformers as attention: its kernels in Triton's interpreter, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).with_name("interpreted.py")


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
@pytest.mark.timeout(1800)
def test_kernels_agree_with_the_torch_backend() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "XFORMERS_ENABLE_TRITON": "1", "OMP_NUM_THREADS": "1"}
    # numpy, in which the interpreter computes, warns of what the kernels do with -inf.
    options = ["-q", "-W", "ignore", "-p", "no:cacheprovider", "--noconftest"]
    command = [sys.executable, "-m", "pytest", *options, str(TESTS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=TESTS.parents[3])
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
