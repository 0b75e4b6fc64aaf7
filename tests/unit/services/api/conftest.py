from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from farsight.services.api.text.prompts import PromptEncoder
from tests.unit.services.api.api_support import Client, ScriptedBackend, application, client_on, write_model_dir

Connect = Callable[[ScriptedBackend], Client]


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> PromptEncoder:
    return PromptEncoder(write_model_dir(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.unit.services.api.engine_backend import write_checkpoint  # loads torch

    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def connect(encoder: PromptEncoder) -> Connect:
    """Opens a client on an application over the given backend."""
    return lambda backend: client_on(application(backend, encoder, 100_000))


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend()


@pytest.fixture
def client(connect: Connect, backend: ScriptedBackend) -> Client:
    return connect(backend)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return tmp_path / "model"
