"""Every component answers what its contracts declare, and nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from actors.calls.message import declared
from actors.runtime.component import Component, component_class
from core.config.load import FarsightConfig

COMPONENTS = (
    "router",
    "scheduler-0",
    "kv-offload-manager-0",
    "worker-0",
    "length-predictor-0",
    "serving-time-estimator-0",
    "log-store",
    "supervisor",
)


@pytest.mark.parametrize("component", COMPONENTS)
def test_every_handler_is_declared(component: str) -> None:
    """A public coroutine that no contract declares would never be called; a declared one needs a handler."""
    kind: Any = component_class(component, FarsightConfig())
    public = [name for name in dir(kind) if not name.startswith("_") and not hasattr(Component, name)]
    assert {name for name in public if asyncio.iscoroutinefunction(getattr(kind, name))} == declared(kind).keys()
    contracts = [base for base in kind.__mro__ if getattr(base, "_is_protocol", False)]
    assert all(getattr(kind, name) is not vars(base).get(name) for base in contracts for name in declared(kind))
