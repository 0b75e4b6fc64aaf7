"""Builds and loads the compiled step.

It is compiled for the processor it runs on, so it cannot travel in a wheel: the first process that needs it builds
it and keeps it in the user's cache directory, under a name made of everything it depends on. Its parts are compiled
side by side.
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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache
from pathlib import Path

from farsight.core.errors import FarsightError
from farsight.core.processors import usable_processors
from farsight.engine.checkpoint.catalogue import cache_dir

_HERE = Path(__file__).parent
COMPILE_FLAGS = ["-march=native", "-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno"]
COMPILE_FLAGS += ["-fno-strict-aliasing", "-pthread"]
INSTRUCTIONS = {
    "native": ["-march=native"],
    "none": ["-march=x86-64"],
    "ssse3": ["-march=x86-64-v2"],
    "avx2": ["-march=x86-64-v3"],
    "avx2-vnni": ["-march=x86-64-v3", "-mavxvnni"],
    "avx512": ["-march=x86-64-v4"],
    "avx512-vnni": ["-march=x86-64-v4", "-mavx512vnni"],
    "avx512-bf16": ["-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"],
}
"""What tests and measurements put in place of the first flag, which stands for this processor."""

_BUILD_TIMEOUT_S = 300

Parts = tuple[tuple[str, ...], ...]
PARTS: Parts = (
    ("step.cpp",),
    ("quantized_linear.cpp",),
    ("attention.cpp", "-DFARSIGHT_KV=PlainKv<Bf16>"),
    ("attention.cpp", "-DFARSIGHT_KV=PlainKv<F32>"),
    ("attention.cpp", "-DFARSIGHT_KV=Int8Kv"),
    ("attention.cpp", "-DFARSIGHT_KV=LatentKv<Bf16>"),
    ("attention.cpp", "-DFARSIGHT_KV=LatentKv<F32>"),
    ("dense.cpp",),
    ("sampler.cpp",),
)
"""Source and own flags of each part; the parts that take longest to compile come first."""

NO_COMPILER = "no C++ compiler (c++, g++ or clang++); install one, such as g++, and start again"

_compiling = threading.Event()


class NativeUnavailable(FarsightError):
    """This machine has no compiled step; the message says why."""


@cache
def load_library(parts: Parts = PARTS) -> ctypes.CDLL:
    """The compiled step, built if necessary.

    Args:
        parts: Other sources, with their own flags: what is measured alone.

    Raises:
        NativeUnavailable: no compiler, or it fails.
    """
    compiler = _compiler()
    path = cache_dir() / f"step-{_fingerprint(compiler, parts)}.so"
    if not path.exists():
        _compiling.set()
        try:
            _build(compiler, path, parts)
        finally:
            _compiling.clear()
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(f"{path}: {error}") from error


def _compiler() -> str:
    found = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")
    if found is None:
        raise NativeUnavailable(NO_COMPILER)
    return found


def compiled_name() -> str:
    """Returns a name of the compiled step: another one where sources, compiler or processor are others."""
    return _fingerprint(_compiler(), PARTS)


def is_compiling() -> bool:
    """Whether this process is building the compiled step right now; may be asked by any thread."""
    return _compiling.is_set()


def _fingerprint(compiler: str, parts: Parts) -> str:
    """Hash of the sources, the compiler and the processor."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    texts = [version, repr((COMPILE_FLAGS, parts)).encode(), processor().encode()]
    own = {_HERE / source for source, *_ in parts}
    texts += [path.read_bytes() for path in sorted({*_HERE.glob("*.h"), *_HERE.glob("*.cpp"), *own})]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]


def processor() -> str:
    """Text that identifies the processor's instruction set."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def _build(compiler: str, path: Path, parts: Parts) -> None:
    """Compiles into a file of its own, then renames: several processes may do this at once."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as directory:
            built = Path(directory) / "step.so"
            error = _compile(compiler, built, parts)
            if error is not None:
                raise NativeUnavailable(f"{compiler} fails: {error}")
            built.replace(path)
    except OSError as error:
        raise NativeUnavailable(f"{path.parent}: {error}") from error


def _compile(compiler: str, built: Path, parts: Parts) -> str | None:
    """Compiles the parts and links them; returns why the compiler failed, or None if it did not."""
    objects = [built.with_name(f"{number}.o") for number in range(len(parts))]
    with ThreadPoolExecutor(usable_processors()) as pool:
        jobs = [
            pool.submit(_run, [compiler, *COMPILE_FLAGS, *own, "-fPIC", "-c", str(_HERE / source), "-o", str(to)])
            for (source, *own), to in zip(parts, objects, strict=True)
        ]
        for job in as_completed(jobs):
            if (error := job.result()) is not None:
                pool.shutdown(wait=False, cancel_futures=True)
                return error
    return _run([compiler, *COMPILE_FLAGS, "-shared", *map(str, objects), "-o", str(built)])


def _run(command: Sequence[str]) -> str | None:
    """Runs the compiler; returns why it failed, or None if it did not."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no result within {_BUILD_TIMEOUT_S} s"
    return None if result.returncode == 0 else result.stderr.strip().split("\n")[0] or "no message"


if __name__ == "__main__":  # at install: python -m farsight.engine.native.library
    load_library()
