"""Both ends of the token path between a worker and an ingress replica: each delta once and in order."""

from __future__ import annotations

import random

import pytest

from actors.worker.token_channels import TokenOutbox
from core.messages.tokens import TokenBatches, TokenDelta
from services.ingress.streams import TokenInbox


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


def test_a_repeated_reply_gives_nothing_new() -> None:
    inbox = TokenInbox()
    reply = outbox(num_batches=2).take()
    assert starts(inbox.receive(reply)) == [0, 1]
    assert inbox.receive(reply) == []
    assert inbox.ack_seq == 2


def test_a_reply_gives_what_is_new_in_it() -> None:
    box, inbox = outbox(num_batches=2), TokenInbox()
    inbox.receive(box.take())
    box.put(delta(2))
    assert starts(inbox.receive(box.take())) == [2]


def test_a_reply_that_comes_late_changes_nothing() -> None:
    box, inbox = outbox(num_batches=1), TokenInbox()
    early = box.take()
    box.put(delta(1))
    inbox.receive(box.take())
    assert inbox.receive(early) == []
    assert inbox.ack_seq == 2


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


def test_a_new_connection_starts_at_what_is_there() -> None:
    box, old = outbox(num_batches=3), TokenInbox()
    box.acknowledge(2)
    inbox = TokenInbox()
    assert inbox.ack_seq == 0
    assert starts(inbox.receive(box.take())) == [2]
    assert inbox.ack_seq == 3
    assert starts(old.receive(box.take())) == [2]


def test_a_new_connection_may_hear_that_nothing_is_there() -> None:
    box, inbox = outbox(num_batches=2), TokenInbox()
    box.acknowledge(2)
    assert inbox.receive(box.take()) == []
    assert (inbox.incarnation, inbox.ack_seq) == ("w", 0)
    box.put(delta(2))
    assert starts(inbox.receive(box.take())) == [2]


def test_a_connection_belongs_to_the_worker_life_that_answers_first() -> None:
    inbox = TokenInbox()
    assert inbox.incarnation == ""
    inbox.receive(outbox("w1").take())
    assert inbox.incarnation == "w1"
    assert inbox.receive(outbox("w2", num_batches=1).take()) == []
    assert (inbox.incarnation, inbox.ack_seq) == ("w1", 0)


def test_an_outbox_counts_what_is_not_acknowledged() -> None:
    box = TokenOutbox("w")
    assert box.num_deltas == 0
    box.put(delta(0))
    box.put(delta(1))
    assert box.num_deltas == 2, "not taken yet"
    box.take()
    box.put(delta(2))
    assert box.num_deltas == 3
    box.take()
    box.acknowledge(1)
    assert box.num_deltas == 1, "the first batch held two"
    box.acknowledge(1)
    assert box.num_deltas == 1
    box.acknowledge(2)
    assert box.num_deltas == 0


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
