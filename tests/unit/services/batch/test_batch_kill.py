"""A real process, killed three times."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from farsight.services.api.batches.sender import GROUP_LINES
from farsight.services.batch.progress import partial_path
from tests.unit.services.batch.batch_child import CONCURRENCY
from tests.unit.services.batch.batch_support import numbered, read_output

TIMEOUT_S = 300.0
"""For anything at all: a busy machine must not fail a test."""

pytestmark = pytest.mark.timeout(4 * TIMEOUT_S)

NUM_LINES = 500
NUM_KILLS = 3
MORE_CALLS = 40
"""So many a child answers after those that its killer waits for."""

ROOT = Path(__file__).resolve().parents[4]


def _start(source: Path, target: Path, calls: Path, max_calls: int = NUM_LINES) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.unit.services.batch.batch_child"]
    command += [str(source), str(target), str(calls), str(max_calls)]
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})


def _num_calls(calls: Path) -> int:
    return calls.read_bytes().count(b"\n") if calls.exists() else 0


def _kill_after(process: subprocess.Popen[bytes], calls: Path, num_calls: int, delay_s: float) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while _num_calls(calls) < num_calls:
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.001)
    time.sleep(delay_s)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_batch_killed_three_times_is_complete_in_order_and_each_line_once(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    source, target, calls = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "calls"
    batch = numbered(source, NUM_LINES)
    kept: set[bytes] = set()
    for _ in range(NUM_KILLS):
        before = _num_calls(calls)
        num_calls = rng.randint(2 * GROUP_LINES, NUM_LINES // 4)
        process = _start(source, target, calls, num_calls + MORE_CALLS)
        _kill_after(process, calls, before + num_calls, rng.uniform(0, 0.02))
        lines = partial_path(target).read_bytes().split(b"\n")[1:-1]
        assert kept <= set(lines)  # nothing that an earlier run had written is lost
        kept = set(lines)
        assert not target.exists()
    assert 0 < len(kept) < NUM_LINES

    assert _start(source, target, calls).wait(TIMEOUT_S) == 0

    output = read_output(target)
    assert [line["custom_id"] for line in output] == [line.custom_id for line in batch.lines]
    texts = [line["response"]["body"]["choices"][0]["text"] for line in output]
    assert texts == [str(number) for number in range(NUM_LINES)]
    assert kept <= set(target.read_bytes().split(b"\n"))  # the very results, not new ones
    assert not partial_path(target).exists()
    ran = Counter(calls.read_bytes().split())
    assert set(ran) == {b"%d" % number for number in range(NUM_LINES)}
    # A kill costs what was under way, in the queue to the disk, or in the group being written.
    assert sum(ran.values()) - NUM_LINES <= NUM_KILLS * (2 * CONCURRENCY + 2 * GROUP_LINES)
