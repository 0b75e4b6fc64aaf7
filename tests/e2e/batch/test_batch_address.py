"""``farsight batch --address``: on a cluster that is there, in which nothing may be left behind."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.batch.batch_runs import (
    TIMEOUT_S,
    BatchRun,
    check_output,
    driver_among,
    hosts_among,
    start_batch,
    wait_gone,
    wait_no_hosts,
    write_requests,
)
from tests.e2e.ray_head import Head, running_head

pytestmark = pytest.mark.timeout(4 * TIMEOUT_S)

NUM_LINES = 2000


@pytest.fixture(scope="module")
def cluster() -> Iterator[Head]:
    with running_head() as running:
        yield running


def batch(cluster: Head, source: Path, target: Path, concurrency: int = 8) -> BatchRun:
    flags = ("--address", cluster.dashboard, "--concurrency", str(concurrency))
    env = {name: cluster.environment[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")}
    return start_batch(source, target, *flags, env=env)


def _command(cluster: Head, run: BatchRun) -> None:
    driver = driver_among(cluster.children())
    driver.suspend()
    run.process.kill()
    run.wait()
    driver.kill()  # the job would go on without the command


def _driver(cluster: Head, run: BatchRun) -> None:
    driver_among(cluster.children()).kill()
    assert run.wait() == 1
    assert "Run the same command again to resume." in run.said()


def _interrupt(cluster: Head, run: BatchRun) -> None:
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.said()


def test_nothing_is_left_in_the_cluster(cluster: Head, tmp_path: Path) -> None:
    source, target = write_requests(tmp_path / "in.jsonl", NUM_LINES), tmp_path / "out.jsonl"
    kept = 0
    for kill in (_command, _driver, _interrupt):
        run = batch(cluster, source, target)
        run.wait_for(run.has_driver)
        driver = driver_among(cluster.children())
        run.wait_done(kept + 20)
        driver.suspend()  # while we look around, the batch must not come to its end
        hosts = hosts_among(cluster.children())
        assert hosts
        driver.resume()
        kill(cluster, run)
        wait_gone(hosts)
        wait_no_hosts(cluster.children)
        assert not target.exists()
        kept = run.num_done()

    again = batch(cluster, source, target, concurrency=256)  # this one runs to its end
    assert again.wait() == 0, again.said()
    assert f"farsight batch: resumes with {kept}/{NUM_LINES} done" in again.said()
    check_output(target, NUM_LINES)
    wait_no_hosts(cluster.children)
