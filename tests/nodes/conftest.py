"""A Ray cluster of several nodes on this machine, and in it a running service."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from benchmarks.ray_nodes import Nodes
from tests.actors.conftest import CONTINUOUS, ROOT, open_system
from tests.actors.conftest import actor_model_dir as actor_model_dir
from tests.actors.conftest import truth as truth
from tests.actors.local_system import System
from tests.stage import on_stage

SOON = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 300, "health_check_failure_threshold": 5}
"""How fast Ray finds that a node is lost; it takes 15 s unless told."""


@on_stage()
def nodes() -> Iterator[Nodes]:
    running = Nodes(2, SOON)
    ray.init(
        address=running.address,
        log_to_driver=False,
        logging_level=logging.ERROR,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
    )
    yield running
    ray.shutdown()
    running.end()


@on_stage(level=1)
def spread_system(nodes: Nodes, actor_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with open_system("split", actor_model_dir, tmp_path_factory.mktemp("log"), CONTINUOUS) as system:
        yield system
