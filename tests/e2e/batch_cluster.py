"""A private Ray cluster with its Jobs API, in a process of its own; runs one shell command as a job: COMMAND.

Prints the log of the job and then ``status N``.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import sys
import tempfile
from pathlib import Path

from services.batch.submit import connect, submit_entrypoint
from services.signals import StopSignal


def main(command: str) -> None:
    stop = StopSignal()
    directory = Path(tempfile.mkdtemp(prefix="farsight-test-"))
    stop.starting(lambda: shutil.rmtree(directory, ignore_errors=True))
    token = directory / "auth_token"
    token.write_text(secrets.token_hex(32))
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_TMPDIR": str(directory)}
    import ray

    try:
        context = ray.init(
            address="local",
            num_cpus=1,
            include_dashboard=True,
            object_store_memory=100_000_000,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        stop.install()
        os.environ["RAY_ADDRESS"] = "http://127.0.0.1:1"  # another cluster's, which must not be asked
        client = connect(f"http://{context.dashboard_url}")
        stop.running()
        status = submit_entrypoint(client, command, {"GREETING": "good day"}, stop, _say)
        _say(f"status {status}\n")
    finally:
        ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
