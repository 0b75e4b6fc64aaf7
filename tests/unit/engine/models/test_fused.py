"""Fused kernels in Triton's interpreter, in a process of its own, and compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1]
TESTS = ("models/interpreted_fused.py", "models/interpreted_families.py", "attention/interpreted.py")


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tests", TESTS)
def test_kernels_agree_with_torch(tests: str) -> None:
    interpret(FOLDER / tests)


def interpret(*more: str | Path) -> None:
    """Runs tests in a process whose kernels run in Triton's interpreter, with further options of pytest."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "XFORMERS_ENABLE_TRITON": "1", "OMP_NUM_THREADS": "1"}
    # numpy, in which the interpreter computes, warns of what the kernels do with -inf.
    options = ["-q", "-W", "ignore", "-p", "no:cacheprovider", "--noconftest"]
    command = [sys.executable, "-m", "pytest", *options, *map(str, more)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=FOLDER.parents[2])
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
def test_kernels_compile_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes what the compiler refuses, such as a variable of two types; and nothing spills."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from benchmarks import gpu_kernels

    made = [*gpu_kernels.compiled_norm(4096), *gpu_kernels.compiled_heads(96), *gpu_kernels.compiled_mlp()]
    assert {each.name for each in made} == {"_add_norm", "_rotate_and_store", "_gated", "_product"}
    assert not any(each.spilled for each in made)
