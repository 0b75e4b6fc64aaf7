"""A private Ray cluster with its Jobs API, in a process of its own.

Prints the address of the dashboard and the file with the token in one line, and lives until INT or TERM.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import sys
import tempfile
import time
from pathlib import Path

from services.launch.cluster import few_daemons
from services.launch.signals import StopSignal
from services.proxy.ports import reserved_ports


def main() -> None:
    stop = StopSignal()
    directory = Path(tempfile.mkdtemp(prefix="farsight-test-"))
    stop.starting(lambda: shutil.rmtree(directory, ignore_errors=True))
    token = directory / "auth_token"
    token.write_text(secrets.token_hex(32))
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_TMPDIR": str(directory)}
    # Farsight is installed in this cluster: a plain "python" finds it.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    import ray

    try:
        with reserved_ports() as ports:
            with few_daemons(ports):
                context = ray.init(
                    address="local",
                    num_cpus=1,
                    include_dashboard=True,
                    object_store_memory=100_000_000,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
            stop.install()
            stop.running()
            sys.stdout.write(f"http://{context.dashboard_url} {token}\n")
            sys.stdout.flush()
            while not stop.received:
                time.sleep(0.1)
    finally:
        ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
