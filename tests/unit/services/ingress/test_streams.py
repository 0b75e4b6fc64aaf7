"""Tokens on their way from a worker to a client: each delta once and in order, and what waits together as one."""

from __future__ import annotations

import asyncio
import random

import pytest

from farsight.actors.worker.token_channels import TokenOutbox
from farsight.core.messages.tokens import DeltaLogprobs, TokenBatches, TokenDelta
from farsight.core.request import Origin, Request, SamplingParams
from farsight.services.ingress.streams import Mailbox, StreamTrace, TokenInbox


def delta(start: int) -> TokenDelta:
    return TokenDelta("a", 0, start, (start,), "x", None, None)


def outbox(incarnation: str = "w", num_batches: int = 0) -> TokenOutbox:
    """One that has sealed so many batches of one delta each."""
    box = TokenOutbox(incarnation)
    for start in range(num_batches):
        box.put(delta(start))
        box.take()
    return box


def starts(deltas: list[TokenDelta]) -> list[int]:
    return [each.start for each in deltas]


def test_numbers_go_on_after_the_worker_has_dropped_what_nobody_asked_for() -> None:
    box, inbox = outbox(num_batches=2), TokenInbox()
    assert starts(inbox.receive(box.take())) == [0, 1]
    box.put(delta(2))
    box.take()
    box.clear()
    assert box.num_deltas == 0
    box.put(delta(3))
    assert starts(inbox.receive(box.take())) == [3]
    assert inbox.ack_seq == 4


def test_a_new_connection_starts_at_what_is_there_even_if_that_is_nothing() -> None:
    box, old, inbox = outbox(num_batches=3), TokenInbox(), TokenInbox()
    box.acknowledge(2)
    assert inbox.ack_seq == 0
    assert starts(inbox.receive(box.take())) == [2]
    assert inbox.ack_seq == 3
    assert starts(old.receive(box.take())) == [2]
    box.acknowledge(3)
    inbox = TokenInbox()
    assert inbox.receive(box.take()) == []
    assert (inbox.incarnation, inbox.ack_seq) == ("w", 0)
    box.put(delta(3))
    assert starts(inbox.receive(box.take())) == [3]


def test_a_connection_belongs_to_the_worker_life_that_answers_first() -> None:
    inbox = TokenInbox()
    assert inbox.incarnation == ""
    inbox.receive(outbox("w1").take())
    assert inbox.incarnation == "w1"
    assert inbox.receive(outbox("w2", num_batches=1).take()) == []
    assert (inbox.incarnation, inbox.ack_seq) == ("w1", 0)


def test_an_outbox_counts_what_is_not_acknowledged() -> None:
    box = TokenOutbox("w")
    box.put(delta(0))
    box.put(delta(1))
    assert box.num_deltas == 2, "not taken yet"
    box.take()
    box.put(delta(2))
    box.take()
    assert box.num_deltas == 3
    for _ in range(2):
        box.acknowledge(1)
        assert box.num_deltas == 1, "the first batch held two"


@pytest.mark.parametrize("seed", range(20))
def test_over_a_bad_connection_each_delta_comes_once_and_in_order(seed: int) -> None:
    rng = random.Random(seed)
    box, inbox = TokenOutbox("w"), TokenInbox()
    replies: list[TokenBatches] = []
    received: list[int] = []
    num_put = 0
    for _ in range(300):
        match rng.choice(["put", "poll", "reply", "reply", "lose"]):
            case "put":
                box.put(delta(num_put))
                num_put += 1
            case "poll":
                box.acknowledge(rng.choice([inbox.ack_seq, 0]))
                replies.append(box.take())
            case "reply" if replies:  # late, twice, in any order
                received += starts(inbox.receive(rng.choice(replies)))
            case "lose":
                replies.clear()
        assert box.num_deltas >= num_put - len(received)
    received += starts(inbox.receive(box.take()))
    assert received == list(range(num_put))
    box.acknowledge(inbox.ack_seq)
    assert box.num_deltas == 0


def part(start: int, text: str, **fields: object) -> TokenDelta:
    return TokenDelta("r", 0, start, (100 + start,), text, **fields)  # type: ignore[arg-type]


async def test_what_waits_together_is_one_delta() -> None:
    box = Mailbox()
    box.put(part(0, "a", cached_len=7, logprobs=DeltaLogprobs((((100,), (-1.0,)),), (((5,), (-2.0,)),))))
    box.put(part(1, "b", logprobs=DeltaLogprobs((((101,), (-3.0,)),))))
    box.put(part(2, "c", finish_reason="stop"))
    found = await box.take()
    assert (found.start, found.token_ids, found.text) == (0, (100, 101, 102), "abc")
    assert (found.finish_reason, found.cached_len) == ("stop", 7)
    assert found.logprobs == DeltaLogprobs((((100,), (-1.0,)), ((101,), (-3.0,))), (((5,), (-2.0,)),))


async def test_a_reader_waits_and_a_single_delta_passes_as_it_is() -> None:
    box = Mailbox()
    reader = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    assert not reader.done()
    only = part(0, "a")
    box.put(only)
    assert await reader is only
    assert len(box) == 0


async def test_a_failure_comes_by_itself_and_last() -> None:
    box = Mailbox()
    box.put(part(0, "a"))
    box.put(TokenDelta("r", 0, 1, (), "", "error", "broken"))
    assert (await box.take()).text == "a"
    assert (await box.take()).error == "broken"

    box.put(part(1, "b"))
    box.fail(ValueError("refused"))
    assert (await box.take()).text == "b"
    for _ in range(2):
        with pytest.raises(ValueError, match="refused"):
            await box.take()


TRACED = Origin("cmpl-1f", traceparent="00-" + "ab" * 16 + "-" + "cd" * 8 + "-01")


@pytest.mark.parametrize(
    ("origin", "named"),
    [
        (None, {}),
        (Origin("cmpl-1f"), {"response_id": "cmpl-1f"}),
        (TRACED, {"response_id": "cmpl-1f", "trace_id": "ab" * 16}),
    ],
)
def test_a_latency_is_found_by_its_answer_and_its_trace(origin: Origin | None, named: dict[str, str]) -> None:
    request = Request("r", 0, "", (5,), SamplingParams(1), origin=origin)
    assert StreamTrace(request, 0.0).exemplar == named
