"""One server for all attacks: emulated device, short limits of time, one ingress replica behind the proxy."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest

from benchmarks.burst import PROFILE
from tests.attack.victim import Victim
from tests.e2e.server import start_server
from tests.stage import on_stage

HERE = "tests/attack/"
TIMEOUT_S = 900.0
VOLUME = float(os.environ.get("ATTACK_VOLUME", "0.1"))
"""Share of the full number of connections; ``make test-attack`` takes all of them."""

LIMITS = """
[server]
ingress_replicas = 1
head_timeout_s = 4.0
body_timeout_s = 4.0
idle_timeout_s = 3.0
max_queued_requests = 100000
max_wait_s = 0
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(HERE):
            item.add_marker(pytest.mark.attack)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture
def volume() -> float:
    return VOLUME


@on_stage()
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    folder = tmp_path_factory.mktemp("victim")
    (folder / "profile.json").write_text(json.dumps(PROFILE))
    (folder / "config.toml").write_text(LIMITS)
    flags = ("--device", f"emulated:{folder / 'profile.json'}", "--kv-memory", "64MiB")
    server = start_server(folder / "server.log", *flags, "--config", str(folder / "config.toml"))
    yield Victim(server)
    server.stop()


@pytest.fixture
def victim(running: Victim) -> Iterator[Victim]:
    """Beside the attack a neighbour reads streams; after it everything is as before it."""
    running.remember()
    with running.neighbour():
        yield running
    running.check_unharmed()
