"""The open requests of an ingress replica: whatever is lost on the way, a stream has no gap, no repeat and one end."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from core.messages.requests import AnnounceReply, Key, Placed, Refusal, SubmitReply
from core.messages.tokens import TokenDelta
from core.request import Request
from services.ingress.ledger import ABORT_AGAIN_S, RequestLedger
from tests.unit.services.ingress.ledger_messages import refusal, stream

BEGIN = 100.0


@dataclass
class Client:
    """What the client of one request has seen."""

    out: int
    tokens: list[int] = field(default_factory=list)
    num_ends: int = 0
    left: bool = False
    attempts: list[Request] = field(default_factory=list)

    @property
    def waits(self) -> bool:
        return not self.left and self.num_ends == 0


@dataclass
class Run:
    """An attempt in a worker; token i of attempt k is 1000 k + i, so that every token tells where it is from."""

    request: Request
    replica: str
    emitted: int

    def next(self, rng: random.Random) -> TokenDelta:
        most = self.request.sampling.max_new_tokens
        start, self.emitted = self.emitted, min(most, self.emitted + rng.choice([1, 1, 1, 2, 3]))
        attempt = self.request.attempt
        tokens = tuple(1000 * attempt + i for i in range(start, self.emitted))
        finish = "length" if self.emitted == most else rng.choice([None] * 12 + ["stop"])
        return TokenDelta(self.request.request_id, attempt, start, tokens, "", finish, None)


class Network:
    """A network that delivers everything late, twice, in any order, or not at all, and says what is not so."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now = BEGIN
        self.ledger = RequestLedger("i")
        self.clients: dict[str, Client] = {}
        self.runs: dict[Key, Run] = {}
        self.wire: list[tuple[str, TokenDelta]] = []  # everything ever emitted
        self.unread: list[tuple[str, TokenDelta]] = []
        self.aborts: dict[Key, int] = {}

    # The ingress replica ..................................................................................

    def open(self) -> None:
        name = f"r{len(self.clients)}"
        self.clients[name] = Client(self.rng.randint(1, 12))
        self.ledger.open(stream(name, out=self.clients[name].out))

    def close(self, name: str) -> None:
        self.clients[name].left = True
        self.ledger.close(name, self.now)

    def take(self) -> list[Request]:
        requests, aborts = self.ledger.take_outgoing()
        for key in aborts:
            client = self.clients[key[0]]
            newest = max((each.attempt for each in requests if each.request_id == key[0]), default=-1)
            newest = max(newest, len(client.attempts) - 1)
            assert not client.waits or key[1] < newest, "the client's own attempt is aborted"
            self.aborts[key] = self.aborts.get(key, 0) + 1
            assert self.aborts[key] <= 1 + (self.now - BEGIN) / ABORT_AGAIN_S
            if self.reliable or self.rng.random() < 0.6:
                for run in [each for each in self.runs if each[0] == key[0] and each[1] <= key[1]]:
                    del self.runs[run]
        for each in requests:
            client = self.clients[each.request_id]
            assert client.waits, "no client waits for this"
            assert list(each.output_ids) == client.tokens, "it does not begin where the client's tokens end"
            assert each.attempt == len(client.attempts), "attempts rise by one"
            client.attempts.append(each)
        return list(requests)

    def receive(self, items: Sequence[tuple[str, TokenDelta]]) -> None:
        for replica, item in items:
            for shown in self.ledger.receive(replica, f"{replica}-life", [item], self.now):
                client = self.clients[shown.request_id]
                assert client.waits, "tokens for a client that has left or has got an end"
                assert shown.attempt == len(client.attempts) - 1, "tokens of an older attempt"
                assert shown.start == len(client.tokens)
                client.tokens += shown.token_ids
                client.num_ends += shown.finish_reason is not None
        self.check()

    def refused(self, refusals: list[Refusal]) -> None:
        for each in refusals:
            assert self.clients[each.request_id].waits
            self.clients[each.request_id].num_ends += 1

    # Everybody else .......................................................................................

    reliable = False

    def submit(self, requests: list[Request]) -> None:
        outcomes = ["placed"] if self.reliable else ["placed", "placed", "unheard", "lost", "refused"]
        reply: list[Placed] = []
        refusals = []
        for each in requests:
            match self.rng.choice(outcomes):
                case "refused":
                    refusals += [refusal(each.request_id, each.attempt)] * self.rng.choice([1, 2])
                case "lost":
                    self.ledger.submit_failed([each])
                case outcome:
                    run = Run(each, self.rng.choice("abc"), len(each.output_ids))
                    self.runs[each.request_id, each.attempt] = run
                    if outcome == "placed":
                        reply.append(Placed(each.request_id, each.attempt, run.replica, f"{run.replica}-life"))
                    else:
                        self.ledger.submit_failed([each])
        self.refused(self.ledger.submitted(SubmitReply(tuple(reply), tuple(refusals))))

    def step(self) -> None:
        if self.runs:
            key = self.rng.choice(sorted(self.runs))
            run = self.runs[key]
            if not self.reliable and self.rng.random() < 0.05:
                item = TokenDelta(*key, run.emitted, (), "", "abort", "gave it up")
            else:
                item = run.next(self.rng)
            if item.finish_reason is not None:
                del self.runs[key]
            self.wire.append((run.replica, item))
            self.unread.append((run.replica, item))

    def lose_worker(self, replica: str, *, said: bool) -> None:
        self.runs = {key: run for key, run in self.runs.items() if run.replica != replica}
        if said:
            self.ledger.worker_lost(replica)

    def announce(self) -> None:
        announced = self.ledger.announce().open
        keys = [(each.request_id, each.attempt) for each in announced]
        waiting = {name for name, client in self.clients.items() if client.waits}
        assert {name for name, _ in keys} <= waiting
        for name, attempt in keys:
            assert attempt == len(self.clients[name].attempts) - 1, "an attempt that was never sent"
        if self.reliable:
            missing = [key for key in keys if key not in self.runs]
        else:  # lies: what runs is lost, what does not is not
            missing = [key for key in [*keys, *self.runs] if self.rng.random() < 0.3]
        self.refused(self.ledger.announced(AnnounceReply(tuple(missing), (), ())))

    def check(self) -> None:
        assert len(self.ledger) == sum(client.waits for client in self.clients.values())
        for client in self.clients.values():
            assert client.num_ends <= 1
            assert len(client.tokens) <= client.out
            assert [token % 1000 for token in client.tokens] == list(range(len(client.tokens))), "a gap or a repeat"
            assert [token // 1000 for token in client.tokens] == sorted(token // 1000 for token in client.tokens)
            for attempt in client.attempts:
                assert list(attempt.output_ids) == client.tokens[: len(attempt.output_ids)]

    def live(self, num_actions: int) -> None:
        actions = ["open", "take", "step", "step", "step", "next", "next", "any", "drop", "announce", "time", "lost"]
        actions += ["close"] * (self.rng.random() < 0.5)
        for _ in range(num_actions):
            match self.rng.choice(actions):
                case "open" if len(self.clients) < 20:
                    self.open()
                case "take":
                    self.submit(self.take())
                case "step":
                    self.step()
                case "next":
                    self.receive(self.unread[:3])
                    del self.unread[:3]
                case "any" if self.wire:
                    self.receive(self.rng.choices(self.wire, k=2))
                case "drop" if self.unread:
                    self.unread.pop(self.rng.randrange(len(self.unread)))
                case "announce":
                    self.announce()
                case "time":
                    self.now += self.rng.uniform(0, 0.7)
                case "lost":
                    self.lose_worker(self.rng.choice("abc"), said=self.rng.random() < 0.7)
                case "close":
                    waiting = [name for name, client in self.clients.items() if client.waits]
                    if waiting:
                        self.close(self.rng.choice(waiting))
            self.check()

    def settle(self) -> None:
        """The network becomes good: whatever it did before, everything comes to an end."""
        self.reliable = True
        for _ in range(40):
            self.now += 1.1
            self.submit(self.take())
            for _ in range(4 * len(self.runs)):
                self.step()
            self.receive(self.unread)
            self.unread.clear()
            self.announce()


@settings(max_examples=300)
@given(seed=st.integers(0, 2**32))
def test_over_any_network_a_client_sees_an_exact_sequence_and_one_end(seed: int) -> None:
    network = Network(random.Random(seed))
    network.live(200)
    network.settle()
    network.check()
    for client in network.clients.values():
        assert client.left or client.num_ends == 1
    assert len(network.ledger) == 0
    assert network.ledger.announce().open == ()
    assert network.runs == {}, "a worker runs on for no client"
