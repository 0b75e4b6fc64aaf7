"""Components die or hang under load and are replaced: no stream gets another token than without."""

from __future__ import annotations

import asyncio
import itertools
import signal
import threading
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from farsight.actors.runtime.host import ComponentHost
from farsight.actors.runtime.names import SUPERVISOR
from farsight.actors.worker.model_worker import ModelWorker
from farsight.core.messages.status import ComponentStatus
from farsight.services.ingress.engine_client import EngineClient
from tests.actors.local_system import (
    NUM_TOKENS,
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

KINDS = (
    "router",
    "scheduler-0",
    "worker-1",
    "kv-offload-manager-0",
    "length-predictor-0",
    "serving-time-estimator-0",
    "log-store",
    "supervisor",
)

DEATHS = [
    *(("split", (name,)) for name in KINDS),
    ("split", ("worker-0", "worker-1")),
    ("split", ("router", "scheduler-0", "worker-0")),
    ("split", ("scheduler-1", "worker-1", "supervisor")),
    ("split", ("worker-0", "scheduler-0", "kv-offload-manager-0")),  # what they did moves to the other replica
    ("fused", ("router",)),  # and all others that live in the same process; a worker's is its own, as in "split"
    ("fused", ("router", "worker-0", "worker-1")),
]


def named(cases: list[tuple[str, tuple[str, ...]]]) -> list[str]:
    return [f"{placement}: {' and '.join(names)}" for placement, names in cases]


FUSED = pytest.mark.parametrize("system", ["fused"], indirect=True)
"""For what no placement changes."""


async def kill_components(
    client: EngineClient, names: tuple[str, ...], number: signal.Signals = signal.SIGKILL
) -> dict[str, ComponentStatus]:
    """Kills their processes at once, or stops them; returns the status before, of all components in them."""
    before = await ready_rows(client)
    pids = {before[name].pid for name in names}
    kill(pids, number)
    return {name: row for name, row in before.items() if row.pid in pids}


async def wait_dead(client: EngineClient, names: set[str]) -> None:
    """Until all of them have been shown as dead, not necessarily at once."""
    left = set(names)

    async def shown() -> bool:
        left.difference_update(row.name for row in (await rows(client)).values() if row.state == "dead")
        return not left

    await eventually(shown, f"shown dead: {left}")


async def wait_successors(client: EngineClient, died: dict[str, ComponentStatus], because: str = "") -> None:
    """Until each is ready in another process, and has been counted; the old one is gone, and the status says why."""
    status: dict[str, ComponentStatus] = {}

    async def ready() -> bool:
        status.update(await rows(client))
        return all(status[name].state == "ready" and status[name].pid != row.pid for name, row in died.items())

    await eventually(ready, f"ready again: {set(died)}")
    for name, row in died.items():
        assert status[name].restarts == row.restarts + 1
        assert because in status[name].last_end
        assert not because or not psutil.pid_exists(row.pid)


async def assert_unnoticed(
    system: System, truth: Truth, names: tuple[str, ...], number: signal.Signals = signal.SIGKILL
) -> None:
    """They die or stop under load and come back, the dead are shown as dead before, and no stream is another one."""
    async with calm_client(system) as client:
        async with under_load(client, truth) as load:
            gone = await kill_components(client, names, number)
            load.release()
            assert gone.keys() >= set(names)
            if number == signal.SIGKILL:
                await asyncio.gather(wait_dead(client, set(gone)), wait_successors(client, gone))
            else:
                await wait_successors(client, gone, "stopped or blocked")
        truth.check(3, await read(client, 3, 20), 20)


@pytest.mark.parametrize(("system", "names"), DEATHS, indirect=["system"], ids=named(DEATHS))
async def test_no_stream_notices_a_death(system: System, truth: Truth, names: tuple[str, ...]) -> None:
    await assert_unnoticed(system, truth, names)


async def test_a_new_supervisor_starts_who_dies_later(system: System, client: EngineClient, truth: Truth) -> None:
    await wait_successors(client, await kill_components(client, (SUPERVISOR,)))
    async with under_load(client, truth) as load:
        died = await kill_components(client, ("worker-1",))
        load.release()
        await wait_successors(client, died)


@FUSED
async def test_a_resumed_stream_says_so_in_the_log(system: System, client: EngineClient, truth: Truth) -> None:
    async with under_load(client, truth) as load:
        died = await kill_components(client, ("worker-0", "worker-1"))
    for record in await system.log(*(reading.request_id for reading in load.readings)):
        assert record.attempts >= 2
        assert record.finish_reason == "length"
        assert record.output_len == NUM_TOKENS
    await wait_successors(client, died)


STOPS = [
    ("split", ("worker-0", "kv-offload-manager-0", "length-predictor-0", "serving-time-estimator-0", "log-store")),
    ("split", ("router", "scheduler-1")),
    ("split", ("supervisor", "worker-1")),  # its successor has never heard the worker, and is to know how long to wait
    ("fused", (SUPERVISOR,)),  # and all others that live in the same process
]


@pytest.mark.parametrize(("system", "names"), STOPS, indirect=["system"], ids=named(STOPS))
async def test_no_stream_notices_that_a_process_was_stopped(
    system: System, truth: Truth, names: tuple[str, ...]
) -> None:
    """Who is stopped by SIGSTOP neither answers nor dies: its connections stay open, and Ray takes it to be alive."""
    await assert_unnoticed(system, truth, names, signal.SIGSTOP)


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
            await wait_successors(client, {"worker-0": before["worker-0"]}, because)
        truth.check(3, await read(client, 3, 20), 20)
