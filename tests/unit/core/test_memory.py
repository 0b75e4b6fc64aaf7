"""Large blocks go back to the system, whatever lies above them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from core.memory import MAPPED_BYTES

NUM_BLOCKS = 8

_PROGRAM = f"""
import psutil
from core.memory import return_large_blocks
if {{}}:
    assert return_large_blocks()
bytearray(31 << 20)  # freed at once, and glibc's bound is there from now on
blocks, small = [], []
for _ in range({NUM_BLOCKS}):
    blocks.append(bytearray(b"x" * {MAPPED_BYTES}))
    small.append(bytes(5000))
full = psutil.Process().memory_info().rss
del blocks
print(full - psutil.Process().memory_info().rss)
"""


def freed_bytes(returns: bool) -> int:
    found = subprocess.run([sys.executable, "-c", _PROGRAM.format(returns)], capture_output=True, text=True, check=True)
    return int(found.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_large_blocks_are_returned() -> None:
    assert freed_bytes(returns=True) > (NUM_BLOCKS - 1) * MAPPED_BYTES
    assert freed_bytes(returns=False) < NUM_BLOCKS // 2 * MAPPED_BYTES, "the call makes no difference"
