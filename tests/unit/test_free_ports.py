"""Ports that tests give their servers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.free_ports import free_port

ELSEWHERE = "from tests.free_ports import free_port; print(*(free_port() for _ in range(50)))"


def test_nobody_is_given_a_port_of_another() -> None:
    """Neither here nor in another process, though none of them is bound."""
    here = [free_port() for _ in range(50)]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], cwd=root, capture_output=True, text=True, check=True)
    assert len({*here, *map(int, done.stdout.split())}) == 100
