"""Fused kernels in Triton's interpreter, in a process of its own, and compiled; which layers are given to them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from farsight.engine.checkpoint.model_config import load_model_config

FOLDER = Path(__file__).parents[1]
TESTS = ("models/interpreted_fused.py", "attention/interpreted.py")


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tests", TESTS)
def test_kernels_agree_with_torch(tests: str) -> None:
    interpret(FOLDER / tests)


def interpret(tests: Path, *more: str) -> None:
    """Runs tests in a process whose kernels run in Triton's interpreter."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "XFORMERS_ENABLE_TRITON": "1", "OMP_NUM_THREADS": "1"}
    # numpy, in which the interpreter computes, warns of what the kernels do with -inf.
    options = ["-q", "-W", "ignore", "-p", "no:cacheprovider", "--noconftest"]
    command = [sys.executable, "-m", "pytest", *options, *more, str(tests)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=FOLDER.parents[2])
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
@pytest.mark.parametrize(("shape", "fits"), [("gqa", True), ("qwen3", True), ("mistral", True), ("opt", False)])
def test_which_layers_have_kernels(shape: str, fits: bool, model_dir: Callable[[str], Path]) -> None:
    from farsight.engine.models.fused import can_fuse

    assert can_fuse(load_model_config(model_dir(shape))) is fits


POINTERS = ("hidden", "delta", "weight", "normed", "up", "out", "heads", "value", "cos", "sin", "keys", "values")
CONSTANTS = {
    "_add_norm": {"HAS_DELTA": True, "BLOCK": 4096},
    "_gated": {"BLOCK": 1024},
    "_rotate_and_store": {
        "NUM_HEADS": 32,
        "KV_HEADS": 8,
        "HEAD_DIM": 96,
        "ROTARY_DIM": 48,
        "DIM_BLOCK": 128,
        "HALF_BLOCK": 32,
    },
}


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
@pytest.mark.parametrize("name", CONSTANTS)
def test_kernels_compile_for_a_gpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes what the compiler refuses, such as a variable of two types."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from farsight.engine.models import fused

    kernel, constants = getattr(fused, name), CONSTANTS[name]
    types = {**dict.fromkeys(POINTERS, "*bf16"), "positions": "*i64", "slots": "*i64", "eps": "fp32"}
    signature = {each: "constexpr" if each in constants else types.get(each, "i32") for each in kernel.arg_names}
    places = {(kernel.arg_names.index(each),): value for each, value in constants.items()}
    made = triton.compile(ASTSource(kernel, signature, constexprs=places), target=GPUTarget("cuda", 90, 32))
    assert made.asm["cubin"]
