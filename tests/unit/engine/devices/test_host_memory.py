"""The memory that pools are sized by: what is available, which is more than what is free."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from engine.devices.host_memory import available_bytes

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 64 GiB after a large file was read: 1 GiB is free and 50 GiB are available."""
    names = ("MemTotal", "MemFree", "MemAvailable", "Buffers", "Cached", "Shmem", "Active", "Inactive")
    kib = dict(zip(names, (64, 1, 50, 0, 55, 0, 5, 50), strict=True))
    (tmp_path / "meminfo").write_text("".join(f"{name}: {size * GIB // 1024} kB\n" for name, size in kib.items()))
    (tmp_path / "zoneinfo").write_text("")
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    return tmp_path


def test_files_that_can_be_dropped_take_nothing(machine: Path) -> None:
    assert available_bytes(machine / "none") == 50 * GIB


@pytest.mark.parametrize(("limit", "expected"), [("max", 50 * GIB), (str(8 * GIB), 7 * GIB), (str(GIB), 0)])
def test_a_container_takes_what_its_limit_leaves(machine: Path, limit: str, expected: int) -> None:
    (machine / "memory.max").write_text(f"{limit}\n")
    (machine / "memory.current").write_text(f"{3 * GIB}\n")
    (machine / "memory.stat").write_text(f"anon {GIB}\nfile {2 * GIB}\ninactive_file {2 * GIB}\n")
    assert available_bytes(machine) == expected
