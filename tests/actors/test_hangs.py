"""Processes hang under load and are replaced: no stream gets another token than without.

Who is stopped by SIGSTOP neither answers nor dies: its connections stay open, and Ray takes it to be alive.
"""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from actors.runtime.host import ComponentHost
from actors.runtime.names import SUPERVISOR
from actors.worker.model_worker import ModelWorker
from core.messages.status import ComponentStatus
from services.ingress.engine_client import EngineClient
from tests.actors.local_system import (
    System,
    Truth,
    calm_client,
    eventually,
    kill,
    read,
    ready_rows,
    rows,
    under_load,
)

SPLIT_STOPS = [
    ("worker-0", "kv-offload-manager-0", "length-predictor-0", "serving-time-estimator-0", "log-store"),
    ("router", "scheduler-1"),
    ("supervisor", "worker-1"),  # its successor has never heard the worker, and is to know how long to wait
]


async def stop_components(client: EngineClient, names: tuple[str, ...]) -> dict[str, ComponentStatus]:
    """Stops their processes at once; returns the status before of all components in them."""
    before = await ready_rows(client)
    pids = {before[name].pid for name in names}
    kill(pids, signal.SIGSTOP)
    return {name: row for name, row in before.items() if row.pid in pids}


async def replaced(client: EngineClient, hung: dict[str, ComponentStatus], because: str) -> None:
    """Waits until each is ready in another process; the old one is gone, and the status says why."""
    status: dict[str, ComponentStatus] = {}

    async def ready() -> bool:
        status.update(await rows(client))
        return all(status[name].state == "ready" and status[name].pid != row.pid for name, row in hung.items())

    await eventually(ready, f"replaced: {set(hung)}")
    for name, row in hung.items():
        assert status[name].restarts == row.restarts + 1
        assert because in status[name].last_end
        assert not psutil.pid_exists(row.pid)


async def assert_unnoticed(system: System, truth: Truth, names: tuple[str, ...]) -> None:
    """They stop under load and are replaced, and no stream is another one."""
    async with calm_client(system) as client:
        async with under_load(client, truth) as load:
            hung = await stop_components(client, names)
            load.release()
            await replaced(client, hung, "stopped or blocked")
        truth.check(3, await read(client, 3, 20), 20)


@pytest.mark.parametrize("names", SPLIT_STOPS, ids=" and ".join)
async def test_no_stream_notices_that_a_process_was_stopped(
    split_system: System, truth: Truth, names: tuple[str, ...]
) -> None:
    await assert_unnoticed(split_system, truth, names)


async def test_no_stream_notices_that_the_process_of_many_components_was_stopped(
    fused_system: System, truth: Truth
) -> None:
    await assert_unnoticed(fused_system, truth, (SUPERVISOR,))


NUM_STEPS = 60
"""Of a worker before something goes wrong: more than it takes to know what a step costs."""


def block_step(worker: ModelWorker) -> None:
    """The step never returns, as where a collective waits for a rank that is out of step; the process still answers."""
    threading.Event().wait()


def lose_device(worker: ModelWorker) -> None:
    """The step raises, and the device says that it is lost."""
    runner: Any = worker._built.result().runner
    runner._is_lost = lambda: True
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def block_loop(worker: ModelWorker) -> None:
    """The event loop waits for what never comes; the other threads of the process go on."""
    worker._built.get_loop().call_soon_threadsafe(threading.Event().wait)


def arm(host: ComponentHost, fault: Callable[[ModelWorker], None]) -> None:
    """Runs in the process of a worker: after some steps it meets the fault, in its stepping thread."""
    worker: Any = host._components["worker-0"]
    runner = worker._built.result().runner
    compute, numbers = runner.execute, itertools.count()

    def execute(batch: object, sequences: object) -> object:
        if next(numbers) == NUM_STEPS:
            fault(worker)
        return compute(batch, sequences)

    runner.execute = execute


INSIDE = [
    (block_step, "has not ended for"),
    (lose_device, "the device is lost: RuntimeError: CUDA error"),
    (block_loop, "stopped or blocked"),
]


@pytest.mark.parametrize(("fault", "because"), INSIDE, ids=[fault.__name__ for fault, _ in INSIDE])
async def test_no_stream_notices_what_goes_wrong_inside_a_worker(
    split_system: System, truth: Truth, fault: Callable[[ModelWorker], None], because: str
) -> None:
    async with calm_client(split_system) as client:
        before = await ready_rows(client)
        await split_system.host("worker-0").__ray_call__.remote(arm, fault)
        async with under_load(client, truth) as load:
            load.release()
            await replaced(client, {"worker-0": before["worker-0"]}, because)
        truth.check(3, await read(client, 3, 20), 20)
