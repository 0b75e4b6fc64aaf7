"""Settings that hold for every test."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator
from importlib.abc import MetaPathFinder
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from tools.rooms import ROOMS

pytest_plugins = ["tests.processor_time", "tests.stage"]


class OneNameForEachRoom(MetaPathFinder):
    """Refuses a room by its folder, which would be loaded a second time, as other classes."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname in ROOMS:
            raise ImportError(f"the room {fullname} is farsight.{fullname}")


sys.meta_path.insert(0, OneNameForEachRoom())

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Read when Ray is imported. Left unset, Ray would write a token into the home directory. Servers under test set
# their own.
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
# How long Ray's own daemons wait for each other; unless told 30 s, which is too little beside other work.
os.environ.setdefault("RAY_agent_register_timeout_ms", "120000")
os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "120")
# Ray adds 15 to the niceness of its workers: beside other tests a service's processes would hardly run.
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A shell without job control starts background commands with SIGINT ignored, and every process under test would inherit
# that; tests of Ctrl-C would then wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run, no deadline, and no complaint that drawing them takes long: a verdict must not depend
# on the machine's speed.
settings.register_profile(
    "farsight",
    derandomize=True,
    deadline=None,
    max_examples=50,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("farsight")

ACTORS = ("tests/actors/", "tests/nodes/")
"""Their tests start a Ray and services in it; one process runs them, so that one Ray is open at a time."""

SERVERS = ("tests/attack/", "tests/e2e/")
"""Their tests start servers; one process runs them, so that one server is open at a time."""

PAGES = "tests/e2e/pages/"
"""Their tests share a browser."""

ONLY_NIGHTLY = ("tests/actors/", "tests/attack/", "tests/nodes/", "tests/unit/benchmarks/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(ONLY_NIGHTLY):
            item.add_marker(pytest.mark.nightly)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Hides what a file leaves, as libraries and models, from the garbage collector, which would look at it in vain."""
    found = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return found


def pytest_collection_finish() -> None:
    """Does the same with the tests themselves."""
    gc.collect()
    gc.freeze()


class OneForSystems(LoadScopeScheduling):
    """Gives all tests of actors to one process, of servers to one, of pages to one, and each other file to one.

    Tests of systems wait half of their time, so two processes of them fill two cores.
    """

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(PAGES):
            return PAGES
        together = next((each for each in (ACTORS, SERVERS) if nodeid.startswith(each)), None)
        return nodeid.partition("::")[0] if together is None else together[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    return OneForSystems(config, log) if config.getoption("dist") == "loadfile" else None
