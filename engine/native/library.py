"""Builds and loads the compiled step.

It is compiled for the processor it runs on, so it cannot travel in a wheel: the first process that needs it builds
it, in half a minute, and keeps it in the user's cache directory under a name made of everything it depends on.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path

from farsight.core.errors import FarsightError
from farsight.engine.checkpoint.catalogue import cache_dir

_HERE = Path(__file__).parent
_SOURCE = _HERE / "step.cpp"
COMPILE_FLAGS = ["-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno"]
COMPILE_FLAGS += ["-fno-strict-aliasing", "-pthread"]
_BUILD_TIMEOUT_S = 300

_compiling = threading.Event()


class NativeUnavailable(FarsightError):
    """This machine has no compiled step; the message says why."""


@cache
def load_library() -> ctypes.CDLL:
    """The compiled step, built if necessary.

    Raises:
        NativeUnavailable: no compiler, or it fails.
    """
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise NativeUnavailable("no C++ compiler (c++, g++ or clang++)")
    path = cache_dir() / f"step-{_fingerprint(compiler)}.so"
    if not path.exists():
        _compiling.set()
        try:
            _build(compiler, path)
        finally:
            _compiling.clear()
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(f"{path}: {error}") from error


def is_compiling() -> bool:
    """Whether this process is building the compiled step right now; may be asked by any thread."""
    return _compiling.is_set()


def _fingerprint(compiler: str) -> str:
    """Hash of the sources, the compiler and the processor."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    parts = [version, " ".join(COMPILE_FLAGS).encode(), _processor().encode()]
    parts += [path.read_bytes() for path in sorted([*_HERE.glob("*.h"), _SOURCE])]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _processor() -> str:
    """Text that identifies the processor's instruction set."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def _build(compiler: str, path: Path) -> None:
    """Compiles into a file of its own, then renames: several processes may do this at once."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as directory:
            built = Path(directory) / "step.so"
            error = _compile(compiler, built)
            if error is not None:
                raise NativeUnavailable(f"{compiler} fails: {error}")
            built.replace(path)
    except OSError as error:
        raise NativeUnavailable(f"{path.parent}: {error}") from error


def _compile(compiler: str, built: Path) -> str | None:
    """Why the compiler failed; empty if it did not."""
    command = [compiler, *COMPILE_FLAGS, "-shared", "-fPIC", str(_SOURCE), "-o", str(built)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no result within {_BUILD_TIMEOUT_S} s"
    return None if result.returncode == 0 else result.stderr.strip().split("\n")[0] or "no message"


if __name__ == "__main__":  # at install: python -m farsight.engine.native.library
    load_library()
