"""``farsight batch --address``: on a cluster that is there, in which nothing may be left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
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

pytestmark = pytest.mark.timeout(4 * TIMEOUT_S)

ROOT = Path(__file__).resolve().parents[3]
NUM_LINES = 2000


@dataclass
class RunningCluster:
    """A Ray cluster that Farsight did not start."""

    process: subprocess.Popen[str]
    address: str
    token: str

    def batch(self, source: Path, target: Path, concurrency: int = 8) -> BatchRun:
        env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": self.token}
        return start_batch(source, target, "--address", self.address, "--concurrency", str(concurrency), env=env)

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def driver(self) -> psutil.Process:
        return driver_among(self.processes())


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    words = [sys.executable, "-m", "tests.e2e.batch.batch_cluster"]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address, token = process.stdout.readline().split()
        yield RunningCluster(process, address, token)
    finally:
        process.terminate()
        process.communicate(timeout=TIMEOUT_S)


def _command(cluster: RunningCluster, run: BatchRun) -> None:
    driver = cluster.driver()
    driver.suspend()
    run.process.kill()
    run.wait()
    driver.kill()  # the job would go on without the command


def _driver(cluster: RunningCluster, run: BatchRun) -> None:
    cluster.driver().kill()
    assert run.wait() == 1
    assert "Run the same command again to resume." in run.said()


def _interrupt(cluster: RunningCluster, run: BatchRun) -> None:
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.said()


def test_nothing_is_left_in_the_cluster(cluster: RunningCluster, tmp_path: Path) -> None:
    source, target = write_requests(tmp_path / "in.jsonl", NUM_LINES), tmp_path / "out.jsonl"
    kept = 0
    for kill in (_command, _driver, _interrupt):
        run = cluster.batch(source, target)
        run.wait_for(run.has_driver)
        driver = cluster.driver()
        run.wait_done(kept + 20)
        driver.suspend()  # while we look around, the batch must not come to its end
        hosts = hosts_among(cluster.processes())
        assert hosts
        driver.resume()
        kill(cluster, run)
        wait_gone(hosts)
        wait_no_hosts(cluster.processes)
        assert not target.exists()
        kept = run.num_done()

    again = cluster.batch(source, target, concurrency=256)  # this one runs to its end
    assert again.wait() == 0, again.said()
    assert f"farsight batch: resumes with {kept}/{NUM_LINES} done" in again.said()
    check_output(target, NUM_LINES)
    wait_no_hosts(cluster.processes)
