"""Sends a workload to one server: closed loop (a fixed number in flight) or open loop (by the clock)."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import psutil

from farsight.services.bench.answers import Answer
from farsight.services.bench.client import Client, open_client
from farsight.services.bench.targets import BenchTarget, BodyForm, Call


class ProcessTree:
    """A process and its descendants.

    Args:
        pid: The root.

    Raises:
        psutil.NoSuchProcess: there is none.
    """

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)

    def processes(self) -> list[psutil.Process]:
        """The processes of the tree that live now."""
        return [self._root, *self._root.children(recursive=True)]

    def cpu_s(self) -> float:
        """CPU seconds used so far, including descendants that ended and were waited for."""
        total = 0.0
        for process in self.processes():
            try:
                total += sum(process.cpu_times()[:4])
            except psutil.NoSuchProcess:
                continue
        return total


def machine_cpu_s() -> float:
    """CPU seconds that the whole machine has worked since it started."""
    times = psutil.cpu_times()._asdict()
    used: float = sum(times.get(name, 0.0) for name in ("user", "nice", "system", "irq", "softirq"))
    return used


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Connection:
    """How the client talks to servers; see ``open_client``."""

    form: BodyForm
    timeout_s: float = 600.0
    keep_alive: bool = False


@dataclass(frozen=True, slots=True)
class CpuUsage:
    """CPU seconds used during a run.

    Attributes:
        client_s: This process.
        server_s: The server's process tree; None if it is not known.
        others_s: All other processes of this machine; None if the server's are not known.
    """

    client_s: float
    server_s: float | None = None
    others_s: float | None = None


@dataclass(frozen=True, slots=True)
class RunResult:
    """One pass of a workload over one server; ``began_at`` is on the clock of the answers."""

    answers: Sequence[Answer]
    began_at: float
    wall_s: float
    usage: CpuUsage


class Conversations(NamedTuple):
    """A load of conversations, all at once: each sends its next call a while after its last answer.

    Attributes:
        each: Calls of a conversation; they follow each other.
        gaps_s: Seconds before each call, from the answer before it.
    """

    each: int
    gaps_s: tuple[float, ...]


Load = int | Conversations | Sequence[float]
"""The number of calls in flight, conversations, or the due time of each call in seconds from the beginning."""


def measure(target: BenchTarget, calls: Sequence[Call], connection: Connection, load: Load) -> RunResult:
    """Sends the calls and waits for the last answer."""
    return run_async(_measure(target, calls, connection, load))


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end, on uvloop if it is installed."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(work)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not on Windows
        return None
    return uvloop.new_event_loop


async def _measure(target: BenchTarget, calls: Sequence[Call], connection: Connection, load: Load) -> RunResult:
    tree = ProcessTree(target.server_pid) if target.server_pid is not None else None
    gc.collect()  # Collect the garbage of the preparation now, not during the run.
    async with open_client(target, connection.form, connection.timeout_s, connection.keep_alive) as client:
        before = _cpu(tree)
        began_at = time.perf_counter()
        if isinstance(load, int):
            answers = await _closed_loop(client, calls, load)
        elif isinstance(load, Conversations):
            answers = await _converse(client, calls, load)
        else:
            answers = await _open_loop(client, calls, load, began_at)
        wall_s = time.perf_counter() - began_at
        after = _cpu(tree)
    client_s, server_s, machine_s = (late - early for late, early in zip(after, before, strict=True))
    if tree is None:
        return RunResult(answers, began_at, wall_s, CpuUsage(client_s))
    others_s = max(0.0, machine_s - server_s - client_s)
    return RunResult(answers, began_at, wall_s, CpuUsage(client_s, server_s, others_s))


def _cpu(tree: ProcessTree | None) -> tuple[float, float, float]:
    """CPU seconds of this process, the server and the machine."""
    return time.process_time(), tree.cpu_s() if tree else 0.0, machine_cpu_s()


async def _closed_loop(client: Client, calls: Sequence[Call], concurrency: int) -> list[Answer]:
    """Starts the next call when one ends."""
    answers: list[Answer] = []
    coming = iter(calls)

    async def sender() -> None:
        for call in coming:
            answers.append(await client.send(call))  # noqa: PERF401 (one list for all)

    await asyncio.gather(*(sender() for _ in range(min(concurrency, len(calls)))))
    return answers


async def _converse(client: Client, calls: Sequence[Call], turns: Conversations) -> list[Answer]:
    """Runs all conversations side by side."""

    async def talk(first: int) -> list[Answer]:
        answers = []
        for index in range(first, first + turns.each):
            await asyncio.sleep(turns.gaps_s[index])
            answers.append(await client.send(calls[index]))
        return answers

    talks = await asyncio.gather(*(talk(first) for first in range(0, len(calls), turns.each)))
    return [answer for answers in talks for answer in answers]


async def _open_loop(client: Client, calls: Sequence[Call], due_s: Sequence[float], began_at: float) -> list[Answer]:
    """Starts calls when they are due, whatever the number in flight."""
    tasks = []
    for call, due in zip(calls, due_s, strict=True):
        due_at = began_at + due
        if (wait_s := due_at - time.perf_counter()) > 0:
            await asyncio.sleep(wait_s)
        tasks.append(asyncio.create_task(client.send(call, due_at)))
    return list(await asyncio.gather(*tasks))
