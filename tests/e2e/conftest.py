"""One real server for the session; tests that break a server start their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import Server, start_server
from tests.unit.engine.models import save_model

MODEL_NAME = "tiny-llama"


@pytest.fixture(scope="session")
def e2e_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("served") / MODEL_NAME
    directory.mkdir()
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    return save_model(directory, chat_template=template, max_position_embeddings=1024, num_key_value_heads=2)


@pytest.fixture(scope="session")
def server(e2e_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = start_server(
        tmp_path_factory.mktemp("log") / "server.log", "--model", str(e2e_model_dir), "--dtype", "float32"
    )
    yield running
    running.stop()


@pytest.fixture
def base_url(server: Server) -> str:
    return server.base_url


@pytest.fixture
def model_name() -> str:
    return MODEL_NAME
