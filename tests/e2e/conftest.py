"""One real server for all tests of this directory, on the embedded model; tests that break a server start their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.launch import EMBEDDED_NAME
from tests.e2e.server import Server, start_server


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = start_server(tmp_path_factory.mktemp("log") / "server.log")
    yield running
    running.stop()


@pytest.fixture
def base_url(server: Server) -> str:
    return server.base_url


@pytest.fixture
def model_name() -> str:
    return EMBEDDED_NAME
