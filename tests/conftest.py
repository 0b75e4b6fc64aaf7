"""Settings that hold for every test."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Read when Ray is imported. Left unset, Ray would write a token into the home directory. Servers under test set
# their own.
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
# How long Ray's own daemons wait for each other; unless told 30 s, which is too little beside other work.
os.environ.setdefault("RAY_agent_register_timeout_ms", "120000")
os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "120")
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

# Files that are there anyway, locked and not changed.
GATE = Path(__file__)
MACHINE = GATE.with_name("__init__.py")


@pytest.hookimpl(wrapper=True, tryfirst=True)  # so that a test's time does not run while it waits
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Beside other processes of pytest-xdist, a test marked ``alone`` waits until they run none, and they for its end.

    Who waits for the machine holds the gate, so that tests that share the machine cannot keep it for ever.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    with GATE.open() as gate, MACHINE.open() as machine:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(machine, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        return (yield)
