"""A real Ray for the tests of this directory, and in it one running service for each placement."""

from __future__ import annotations

import logging
import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray

from farsight.actors.runtime.peer import Site
from farsight.core.config.actors import ActorsConfig
from farsight.core.config.engine import ModelConfig
from farsight.core.config.learning import LogConfig
from farsight.core.config.load import FarsightConfig
from farsight.core.config.scheduling import SchedulerConfig
from farsight.services.ingress.engine_client import EngineClient
from farsight.services.launch.cluster import few_daemons
from farsight.services.launch.launch import start_components
from farsight.services.launch.stages import silent_stages
from farsight.services.proxy.ports import reserved_ports
from tests.actors.local_system import ENGINE, MAX_LEN, System, Truth, calm_client
from tests.stage import Stage, forwards, on_stage
from tests.unit.engine.small_models import save_model

ROOT = Path(__file__).resolve().parents[2]
NUM_REPLICAS = 2
TIMEOUT_S = 600.0
"""The limit of a test here: it may begin with starting Ray and a service, beside whatever else the machine does."""

WATCHED = ActorsConfig(silence_s=4.0, step_stall_s=4.0)
"""A stopped process is replaced after 4 s, one that is only slow after 40 s."""

CONTINUOUS = SchedulerConfig(standby_slots=4, placement="least-work")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith("tests/actors/") and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def actor_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("actor-model")
    return save_model(out, num_key_value_heads=2, max_position_embeddings=MAX_LEN)


@pytest.fixture(scope="session")
def truth(actor_model_dir: Path) -> Truth:
    """The tokens of every prompt's stream."""
    return Truth(actor_model_dir)


@on_stage()
def ray_cluster() -> Iterator[None]:
    directory = tempfile.mkdtemp(prefix="farsight-test-")
    with reserved_ports() as ports:
        with few_daemons(ports):
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


@contextmanager
def open_system(
    placement: str, model_dir: Path, log_dir: Path, scheduler: SchedulerConfig, /, **tables: Any
) -> Iterator[System]:
    """Two replicas; ``tables`` are of the configuration. Shared by several tests, which leave it as they found it."""
    model = ModelConfig(name="m", dtype="float32", replicas=NUM_REPLICAS)
    usual: dict[str, Any] = {"model": model, "engine": ENGINE, "actors": WATCHED}
    log = LogConfig(path=str(log_dir / "log.sqlite"))
    config = FarsightConfig(scheduler=scheduler, log=log, **(usual | tables))
    # Detached, as in a real service: else whatever the Supervisor has started would die with it.
    running = System(Site(config, str(model_dir), placement, namespace=f"test-{uuid.uuid4().hex[:8]}"))
    try:
        start_components(running.site).wait(silent_stages(600))
        yield running
    finally:
        running.end()


@on_stage(level=1)
def fused_system(
    ray_cluster: None, actor_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[System]:
    with open_system("fused", actor_model_dir, tmp_path_factory.mktemp("log"), CONTINUOUS) as system:
        yield system


@on_stage(level=1)
def split_system(
    ray_cluster: None, actor_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[System]:
    with open_system("split", actor_model_dir, tmp_path_factory.mktemp("log"), CONTINUOUS) as system:
        yield system


forwards("system", 1, lambda param: f"{param}_system")


@pytest.fixture(params=["fused", "split"])
def system(stage: Stage, request: pytest.FixtureRequest) -> System:
    found: System = request.getfixturevalue(f"{request.param}_system")
    return found


@pytest.fixture
async def client(system: System) -> AsyncIterator[EngineClient]:
    async with calm_client(system) as client:
        yield client
