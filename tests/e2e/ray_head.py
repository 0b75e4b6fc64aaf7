"""A Ray cluster with a dashboard that is not Farsight's own, in a process of its own.

Prints one line of JSON (``gcs`` and ``dashboard`` addresses) and ends when its standard input does.
"""

from __future__ import annotations

import json
import logging
import sys

import ray

from tests.free_ports import free_port


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
