"""One real server for all tests of this directory, on the embedded model; tests that break a server start their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.launch.launch import EMBEDDED_NAME
from tests.e2e.server import Server, one_ingress, start_server

HERE = Path(__file__).parent
TIMEOUT_S = 900.0
"""The first test that wants a server waits for its start as well, which takes long on a busy machine."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("log")
    running = start_server(folder / "server.log", *one_ingress(folder))
    yield running
    running.stop()


@pytest.fixture
def base_url(server: Server) -> str:
    return server.base_url


@pytest.fixture
def model_name() -> str:
    return EMBEDDED_NAME
