"""A Ray cluster with a dashboard and a token that is not Farsight's own, in a process of its own.

As a program it prints one line of JSON (``gcs`` and ``dashboard`` addresses) and ends when its standard input does.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import ray

from tests.free_ports import free_port

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 240.0


@dataclass
class Head:
    """A running cluster, and how to reach it."""

    process: subprocess.Popen[str]
    gcs: str
    dashboard: str
    environment: dict[str, str]

    def run(self, *words: str, ok: bool = True) -> str:
        """All that a command with the cluster's token prints."""
        result = subprocess.run(
            words, env=self.environment, cwd="/", capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert (result.returncode == 0) == ok, result.stdout + result.stderr
        return result.stdout + result.stderr

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@contextmanager
def running_head() -> Iterator[Head]:
    """A cluster until the block ends, after which nothing of it is left."""
    directory = Path(tempfile.mkdtemp(prefix="fs-"))  # short: Ray puts sockets there
    token = directory / "auth_token"
    token.write_text(secrets.token_hex(32))
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        # Farsight is installed in this cluster: a plain "python" finds it.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_TMPDIR": str(directory),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "FARSIGHT_ADMIN_TOKEN": "of the cluster",
    }
    environment.pop("RAY_ADDRESS", None)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.ray_head"],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield Head(process, **json.loads(process.stdout.readline()), environment=environment)
    finally:
        children = psutil.Process(process.pid).children(recursive=True)
        process.stdin.close()
        process.wait(TIMEOUT_S)
        process.stdout.close()
        _, alive = psutil.wait_procs(children, timeout=TIMEOUT_S)
        shutil.rmtree(directory, ignore_errors=True)
    assert not alive


def main() -> None:
    context = ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=True,
        dashboard_port=free_port(),
        object_store_memory=100_000_000,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        addresses = {
            "gcs": vars(context)["address_info"]["gcs_address"],
            "dashboard": f"http://{context.dashboard_url}",
        }
        sys.stdout.write(json.dumps(addresses) + "\n")
        sys.stdout.flush()
        sys.stdin.read()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
