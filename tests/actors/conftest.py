"""A real Ray for the session; actors are made and ended by each test."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.control import Control
from actors.model_worker import ModelWorker
from core.config import EngineConfig, FarsightConfig, ModelConfig, SchedulerConfig
from tests.unit.engine.models import save_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def actor_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("actor-model"), num_key_value_heads=2)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    directory = tempfile.mkdtemp(prefix="farsight-test-")
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100_000_000,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=directory,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
    )
    yield
    ray.shutdown()
    shutil.rmtree(directory, ignore_errors=True)


@dataclass
class Fused:
    """The two actors of the fused placement."""

    control: Any
    workers: list[Any]

    @property
    def worker(self) -> Any:
        return self.workers[0]


@pytest.fixture
def fused(request: pytest.FixtureRequest, ray_cluster: None, actor_model_dir: Path) -> Iterator[Fused]:
    """One replica, or as many as the test's indirect parameter says."""
    num_replicas = getattr(request, "param", 1)
    config = FarsightConfig(
        model=ModelConfig(dtype="float32", replicas=num_replicas),
        engine=EngineConfig(kv_memory="1MiB", block_size=4, max_num_seqs=8, num_threads=1),
        scheduler=SchedulerConfig(standby_slots=4),
    )
    options = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": 1000}
    worker_class: Any = ray.remote(ModelWorker)
    control_class: Any = ray.remote(Control)
    workers = [
        worker_class.options(**options).remote(f"worker-{i}", str(actor_model_dir), config) for i in range(num_replicas)
    ]
    control = control_class.options(**options).remote(config)
    for i, worker in enumerate(workers):
        ready = ray.get(worker.start.remote(), timeout=60)
        ray.get(control.connect.remote(str(i), worker, ready), timeout=60)
    yield Fused(control, workers)
    for actor in (control, *workers):
        ray.kill(actor)
