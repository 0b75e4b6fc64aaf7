"""Deltas that wait together are read as one, in order, and nothing of them is lost."""

from __future__ import annotations

import asyncio

import pytest

from core.messages.tokens import DeltaLogprobs, TokenDelta
from services.ingress.streams import Mailbox


def delta(start: int, text: str, **fields: object) -> TokenDelta:
    return TokenDelta("r", 0, start, (100 + start,), text, **fields)  # type: ignore[arg-type]


async def test_what_waits_together_is_one_delta() -> None:
    box = Mailbox()
    box.put(delta(0, "a", cached_len=7, logprobs=DeltaLogprobs((((100,), (-1.0,)),), (((5,), (-2.0,)),))))
    box.put(delta(1, "b", logprobs=DeltaLogprobs((((101,), (-3.0,)),))))
    box.put(delta(2, "c", finish_reason="stop"))
    found = await box.take()
    assert (found.start, found.token_ids, found.text) == (0, (100, 101, 102), "abc")
    assert (found.finish_reason, found.cached_len) == ("stop", 7)
    assert found.logprobs == DeltaLogprobs((((100,), (-1.0,)), ((101,), (-3.0,))), (((5,), (-2.0,)),))


async def test_a_reader_waits_and_a_single_delta_passes_as_it_is() -> None:
    box = Mailbox()
    reader = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    assert not reader.done()
    only = delta(0, "a")
    box.put(only)
    assert await reader is only
    assert len(box) == 0


async def test_a_failure_comes_by_itself_and_last() -> None:
    box = Mailbox()
    box.put(delta(0, "a"))
    box.put(TokenDelta("r", 0, 1, (), "", "error", "broken"))
    assert (await box.take()).text == "a"
    assert (await box.take()).error == "broken"

    box.put(delta(1, "b"))
    box.fail(ValueError("refused"))
    assert (await box.take()).text == "b"
    for _ in range(2):
        with pytest.raises(ValueError, match="refused"):
            await box.take()
