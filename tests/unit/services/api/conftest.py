from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest

from services.api.text.prompts import PromptEncoder
from tests.unit.services.api.api_support import ScriptedBackend, application, write_model_dir

Connect = Callable[[ScriptedBackend], httpx.AsyncClient]


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> PromptEncoder:
    return PromptEncoder(write_model_dir(tmp_path_factory.mktemp("model")))


@pytest.fixture
async def connect(encoder: PromptEncoder) -> AsyncGenerator[Connect, None]:
    """Opens a client on an application over the given backend."""
    async with AsyncExitStack() as stack:
        clients: list[httpx.AsyncClient] = []

        def open_client(backend: ScriptedBackend, max_body_bytes: int = 100_000) -> httpx.AsyncClient:
            transport = httpx.ASGITransport(application(backend, encoder, max_body_bytes))
            client = httpx.AsyncClient(transport=transport, base_url="http://test")
            clients.append(client)
            stack.push_async_callback(client.aclose)
            return client

        yield open_client


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend()


@pytest.fixture
def client(connect: Connect, backend: ScriptedBackend) -> httpx.AsyncClient:
    return connect(backend)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return tmp_path / "model"
