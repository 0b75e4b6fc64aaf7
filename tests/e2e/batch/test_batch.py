"""``farsight batch`` on a private cluster: a whole run, and one that is killed again and again."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farsight.services.batch.progress import partial_path
from tests.e2e.batch.batch_runs import (
    TIMEOUT_S,
    BatchRun,
    check_output,
    expected_status,
    hosts_among,
    start_batch,
    wait_gone,
    without_agents,
    write_requests,
)
from tests.e2e.server import kill_all

pytestmark = pytest.mark.timeout(4 * TIMEOUT_S)

NUM_LINES = 1500
"""Over a hundred in a second: so many that no run is over before a kill, or Ctrl-C, has had its effect."""

SLOWLY = ("--concurrency", "8")
"""For runs that are to be killed in their midst ..."""

FAST = ("--concurrency", "64")
"""... and for those that come to their end; what the model writes does not depend on it."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_requests(tmp_path_factory.mktemp("batch") / "in.jsonl", NUM_LINES)


@pytest.fixture(scope="module")
def undisturbed(source: Path) -> Iterator[tuple[BatchRun, list[Any]]]:
    """A run to its end, and what the model wrote in it; a cluster that the user has named elsewhere is not asked."""
    elsewhere = {"RAY_ADDRESS": "http://127.0.0.1:1"}
    run = start_batch(source, source.with_name("undisturbed.jsonl"), *FAST, env=elsewhere)
    try:
        assert run.wait() == 0, run.said()
        yield run, check_output(run.target, NUM_LINES)
    finally:
        _end(run)


def test_whole_run_says_what_a_user_wants_to_know(undisturbed: tuple[BatchRun, list[Any]]) -> None:
    run, _ = undisturbed
    said = run.said().splitlines()
    num_refused = sum(expected_status(number) != 200 for number in range(NUM_LINES))
    assert [line.partition(" after ")[0] for line in said if "not ready" not in line][:4] == [
        "Starting a private Ray cluster.",
        "farsight batch: Ray: started",
        "farsight batch: Job: submitted",
        f"farsight batch: {NUM_LINES} requests to run, 64 at once; the model is starting",
    ]
    assert all(line.startswith("farsight batch: ") for line in said[1:])  # nothing of Ray's
    done = f"{NUM_LINES}/{NUM_LINES} done, {num_refused} failed"
    assert said[-1] == f"farsight batch: {done}; the answers are in {run.target}"
    assert not partial_path(run.target).exists()


def test_killed_three_times_it_is_complete_in_order_and_each_line_once(
    source: Path, tmp_path: Path, undisturbed: tuple[BatchRun, list[Any]]
) -> None:
    rng = random.Random(3)
    target = tmp_path / "out.jsonl"
    kept = 0
    for kill in (_kill_command, _kill_driver, _interrupt):
        run = start_batch(source, target, *SLOWLY)
        try:
            run.wait_for(run.has_driver)
            driver = run.driver()
            run.wait_done(kept + rng.randint(20, 60))
            driver.suspend()  # while we look around, the batch must not come to its end
            family = without_agents(run.family())
            driver.resume()
            kill(run)
            wait_gone(family)
            assert kept < run.num_done() < NUM_LINES
            kept = run.num_done()
            assert not target.exists()
        finally:
            _end(run)
    run = start_batch(source, target, *FAST)
    try:
        run.wait_for(run.has_driver)
        driver = run.driver()
        run.wait_done(kept + rng.randint(30, 60))
        driver.suspend()  # while we look around, the batch must not come to its end
        hosts = hosts_among(run.family())
        assert hosts
        driver.resume()
        kill_all(hosts)  # the batch goes on by itself
        assert run.wait() == 0, run.said()
    finally:
        _end(run)
    assert f"farsight batch: resumes with {kept}/{NUM_LINES} done\n" in run.said()
    assert check_output(target, NUM_LINES) == undisturbed[1]
    assert not partial_path(target).exists()


def _kill_command(run: BatchRun) -> None:
    run.process.kill()
    run.wait()


def _kill_driver(run: BatchRun) -> None:
    run.driver().kill()
    assert run.wait() != 0
    assert "was ended by signal 9\n" in run.said()


def _interrupt(run: BatchRun) -> None:
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.wait() == 130
    assert run.said().endswith("run the same command again to resume.\n")


def _end(run: BatchRun) -> None:
    if run.process.poll() is None:
        family = run.family()
        run.process.kill()
        run.wait()
        kill_all(family)
