"""A new log in each kind of storage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.actors.redis_server import RedisServer, redis_server


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(params=["sqlite", "redis"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Path or URL of a new log."""
    if request.param == "sqlite":
        return str(tmp_path / "log.sqlite")
    running: RedisServer = request.getfixturevalue("server")
    running.empty()
    return running.url
