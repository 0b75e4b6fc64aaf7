"""When tokens leave the worker; on an event loop, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from actors import token_channel
from actors.token_channel import TokenChannel
from core.codec import decode
from core.messages import TokenBatches, TokenDelta

LONG_S = 30.0


def delta(start: int) -> TokenDelta:
    return TokenDelta("a", 0, start, (1,), "x", None, None)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONG_S):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


async def starts(channel: TokenChannel, ack_seq: int) -> list[int]:
    channel.acknowledge(ack_seq)
    batches = decode(await channel.poll(LONG_S), TokenBatches).batches
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
    monkeypatch.setattr(token_channel, "FLUSH_INTERVAL_S", LONG_S)
    monkeypatch.setattr(token_channel, "FIRST_INTERVAL_S", 0.05)
    channel = TokenChannel("w")
    channel.put([delta(0)], num_rows=100)
    await starts(channel, 0)
    waiting = asyncio.create_task(starts(channel, 1))
    channel.put([delta(1)], num_rows=100)
    channel.put([delta(0)], num_rows=100)
    await asyncio.sleep(0.01)
    assert not waiting.done()
    channel.put([delta(0)], num_rows=100)
    assert await asyncio.wait_for(waiting, LONG_S / 2) == [1, 0, 0]


async def test_an_idle_poll_answers_empty_after_its_timeout() -> None:
    assert decode(await TokenChannel("w").poll(0.01), TokenBatches).batches == ()


async def test_what_was_not_acknowledged_comes_again_at_once() -> None:
    channel = TokenChannel("w")
    channel.put([delta(0)], num_rows=1)
    assert await starts(channel, 0) == [0]
    assert await starts(channel, 0) == [0]


async def test_silence_is_counted_while_nobody_polls_and_forgotten_when_somebody_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token_channel, "TICK_S", 0.01)
    channel = TokenChannel("w")
    await until(lambda: channel.silent_s >= 0.02)
    polling = asyncio.create_task(channel.poll(LONG_S))
    await until(lambda: channel.silent_s == 0)
    await asyncio.sleep(0.1)
    assert channel.silent_s == 0, "a poll that waits for its answer is no silence"
    channel.put([delta(0)], num_rows=1)
    await polling
    channel.close()
