"""When tokens leave the worker, and in which thread it steps; on an event loop, without Ray."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from farsight.actors.worker import token_channels
from farsight.actors.worker.token_channels import TokenChannel
from farsight.core.messages.tokens import TokenDelta
from tests.unit.actors.components import LONG_S, until
from tests.unit.services.commands.test_conformance import read, system


def delta(start: int) -> TokenDelta:
    return TokenDelta("a", 0, start, (1,), "x", None, None)


class Clock:
    """The time of an event loop, that passes when it is told to."""

    def __init__(self) -> None:
        self._now = 0.0
        self._timers: list[tuple[float, Callable[[], object], asyncio.Event]] = []

    def time(self) -> float:
        return self._now

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> SimpleNamespace:
        return self.call_at(self._now + delay_s, callback)

    def call_at(self, when: float, callback: Callable[[], object]) -> SimpleNamespace:
        cancelled = asyncio.Event()
        self._timers.append((when, callback, cancelled))
        return SimpleNamespace(cancel=cancelled.set)

    def pass_s(self, seconds: float) -> None:
        self._now += seconds
        due = [timer for timer in self._timers if timer[0] <= self._now]
        self._timers = [timer for timer in self._timers if timer[0] > self._now]
        for _, callback, cancelled in due:
            if not cancelled.is_set():
                callback()


async def ends_soon(task: asyncio.Task[list[int]]) -> bool:
    """Whether it ends without anything else happening."""
    for _ in range(100):
        await asyncio.sleep(0)
    return task.done()


async def starts(channel: TokenChannel, ack_seq: int) -> list[int]:
    channel.acknowledge(ack_seq)
    batches = (await channel.poll(LONG_S)).batches
    return [each.start for batch in batches for each in batch.deltas]


async def test_a_first_token_and_those_of_few_rows_go_at_once() -> None:
    channel = TokenChannel("w")
    channel.put([delta(0)], num_rows=100)
    assert await starts(channel, 0) == [0]
    channel.put([delta(1)], num_rows=1)
    assert await starts(channel, 1) == [1]


async def test_tokens_of_many_rows_wait_for_company_but_not_for_ever() -> None:
    channel = TokenChannel("w")
    channel.put([delta(0)], num_rows=100)
    await starts(channel, 0)
    waiting = asyncio.create_task(starts(channel, 1))
    channel.put([delta(1)], num_rows=100)
    channel.put([delta(2)], num_rows=100)
    assert await asyncio.wait_for(waiting, LONG_S) == [1, 2]


async def test_first_tokens_of_a_crowd_share_a_reply_but_do_not_wait_for_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    # All that the module takes from asyncio: the time of an event loop, and an event.
    own_time = SimpleNamespace(get_running_loop=lambda: clock, Event=asyncio.Event)
    monkeypatch.setattr(token_channels, "asyncio", own_time)
    channel = TokenChannel("w")
    clock.pass_s(1.0)
    channel.put([delta(0)], num_rows=100)
    await starts(channel, 0)
    waiting = asyncio.create_task(starts(channel, 1))
    channel.put([delta(1)], num_rows=100)
    channel.put([delta(0)], num_rows=100)
    clock.pass_s(0.9 * token_channels.FIRST_INTERVAL_S)
    assert not await ends_soon(waiting)
    channel.put([delta(0)], num_rows=100)
    clock.pass_s(0.2 * token_channels.FIRST_INTERVAL_S)
    assert token_channels.FLUSH_INTERVAL_S > 2 * token_channels.FIRST_INTERVAL_S, "for which the others wait"
    assert await asyncio.wait_for(waiting, LONG_S) == [1, 0, 0]


async def test_an_idle_poll_answers_empty_after_its_timeout() -> None:
    assert (await TokenChannel("w").poll(0.01)).batches == ()


async def test_what_was_not_acknowledged_comes_again_at_once() -> None:
    channel = TokenChannel("w")
    channel.put([delta(0)], num_rows=1)
    assert await starts(channel, 0) == [0]
    assert await starts(channel, 0) == [0]


async def test_silence_is_counted_while_nobody_polls_and_forgotten_when_somebody_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token_channels, "TICK_S", 0.01)
    channel = TokenChannel("w")
    await until(lambda: channel.silent_s >= 0.02)
    polling = asyncio.create_task(channel.poll(LONG_S))
    await until(lambda: channel.silent_s == 0)
    await asyncio.sleep(0.1)
    assert channel.silent_s == 0, "a poll that waits for its answer is no silence"
    channel.put([delta(0)], num_rows=1)
    await polling
    channel.close()


async def test_a_worker_steps_while_all_threads_of_asyncio_are_taken(tmp_path: Path) -> None:
    """It has a thread of its own, however many others there are in its process."""
    async with asyncio.timeout(LONG_S), system("fcfs", tmp_path) as found, found.ingress() as client:
        release = threading.Event()
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        taken = loop.run_in_executor(None, release.wait)
        try:
            await read(client, 0)
            assert not taken.done()
        finally:
            release.set()
            await taken
