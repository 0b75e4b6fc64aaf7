"""The open requests of an ingress replica: whatever is lost on the way, a stream has no gap, no repeat and one end."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from farsight.core.key_sums import KeySums
from farsight.core.messages.requests import AnnounceReply, Key, Placed, Refusal, SubmitReply
from farsight.core.messages.tokens import TokenDelta
from farsight.core.request import Request, SamplingParams
from farsight.services.ingress.ledger import ABORT_AGAIN_S, OpenStream, RequestLedger
from tests.unit.services.ingress.test_ledger import announced

BEGIN = 100.0


@dataclass
class Client:
    """What the client of one request has seen."""

    wanted: Request
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

    def placed(self, known: bool) -> Placed:
        """What the Router says: where it is, or that it waits."""
        where = (self.replica, f"{self.replica}-life") if known else ("", "")
        return Placed(self.request.request_id, self.request.attempt, *where)

    def next(self, rng: random.Random) -> TokenDelta:
        most = self.request.sampling.max_new_tokens
        start, self.emitted = self.emitted, min(most, self.emitted + rng.choice([1, 1, 1, 2, 3]))
        attempt = self.request.attempt
        tokens = tuple(1000 * attempt + i for i in range(start, self.emitted))
        finish = "length" if self.emitted == most else rng.choice([None] * 12 + ["stop", "error"])
        return TokenDelta(self.request.request_id, attempt, start, tokens, "", finish, None)


class Network:
    """A network that delivers everything late, twice, in any order, or not at all, and says what is not so."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now = BEGIN
        self.ledger = RequestLedger("i")
        self.clients: dict[str, Client] = {}
        self.runs: dict[Key, Run] = {}
        self.refusals: list[Refusal] = []  # all that were ever said
        self.heard: dict[Key, str] = {}  # where an attempt is, if the ledger was told
        self.wire: list[tuple[str, TokenDelta]] = []  # everything ever emitted
        self.unread: list[tuple[str, TokenDelta]] = []
        self.aborts: dict[Key, int] = {}

    # The ingress replica ..................................................................................

    def open(self) -> None:
        name = f"r{len(self.clients)}"
        wanted = Request(name, 0, "i", (1,) * 4, SamplingParams(self.rng.randint(1, 12)))
        self.clients[name] = Client(wanted)
        self.ledger.open(OpenStream(wanted))

    def close(self, name: str) -> None:
        if name in self.clients:
            self.clients[name].left = True
        self.ledger.close(name, self.now)

    def take(self) -> list[Request]:
        had_any = self.ledger.has_outgoing
        requests, aborts = self.ledger.take_outgoing()
        assert had_any == bool(requests or aborts) and not self.ledger.has_outgoing
        for key in aborts:
            assert key not in {(each.request_id, each.attempt) for each in self.refusals}, (
                "no worker runs what was refused"
            )
            client = self.clients[key[0]]
            newest = max((each.attempt for each in requests if each.request_id == key[0]), default=-1)
            assert key[1] < len(client.attempts), "an abort of what was never sent"
            assert not client.waits or key[1] < max(newest, len(client.attempts) - 1), "the client's own attempt"
            self.aborts[key] = self.aborts.get(key, 0) + 1
            assert self.aborts[key] <= 1 + (self.now - BEGIN) / ABORT_AGAIN_S
            if self.reliable or self.rng.random() < 0.6:
                for run in [each for each in self.runs if each[0] == key[0] and each[1] <= key[1]]:
                    del self.runs[run]
        for each in requests:
            client = self.clients[each.request_id]
            assert client.waits, "no client waits for this"
            # It begins where the client's tokens end, and attempts rise by one.
            follows = dataclasses.replace(client.wanted, attempt=len(client.attempts), output_ids=tuple(client.tokens))
            assert each == follows
            client.attempts.append(each)
        return list(requests)

    def receive(self, items: Sequence[tuple[str, TokenDelta]]) -> None:
        for replica, item in items:
            self.heard[item.request_id, item.attempt] = replica
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
            client = self.clients[each.request_id]
            assert client.waits and each.attempt == len(client.attempts) - 1
            client.num_ends += 1

    # Everybody else .......................................................................................

    reliable = False

    def submit(self, requests: list[Request]) -> None:
        outcomes = ["placed"] if self.reliable else ["placed", "placed", "waits", "unheard", "lost", "refused"]
        reply: list[Placed] = []
        refusals = []
        for each in requests:
            match self.rng.choice(outcomes):
                case "refused":
                    said = Refusal(each.request_id, each.attempt, "max_tokens", "too long")
                    self.refusals.append(said)
                    if self.rng.random() < 0.3:  # unheard, until it is said again too late
                        self.ledger.submit_failed([each])
                    else:
                        refusals += [said] * self.rng.choice([1, 2])
                case "lost":
                    self.ledger.submit_failed([each])
                case outcome:
                    run = Run(each, self.rng.choice("abc"), len(each.output_ids))
                    self.runs[each.request_id, each.attempt] = run
                    if outcome == "unheard":
                        self.ledger.submit_failed([each])
                    else:
                        reply.append(self.told(run, outcome == "placed"))
        self.refused(self.ledger.submitted(SubmitReply(tuple(reply), tuple(refusals))))

    def told(self, run: Run, known: bool) -> Placed:
        if known:
            self.heard[run.request.request_id, run.request.attempt] = run.replica
        return run.placed(known)

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
            there = [each for each in announced(self.ledger) if each.replica == replica]
            assert bool(there) == self.ledger.runs_on(replica)
            num_resumed = self.ledger.num_resumed
            self.ledger.worker_lost(replica)
            assert self.ledger.num_resumed - num_resumed == len(there), "nothing that runs elsewhere or waits"
            assert not self.ledger.runs_on(replica)

    def announce(self) -> None:
        streams = announced(self.ledger)
        keys = [(each.request_id, each.attempt) for each in streams]
        waiting = {name for name, client in self.clients.items() if client.waits}
        assert {name for name, _ in keys} <= waiting
        for name, attempt in keys:
            assert attempt == len(self.clients[name].attempts) - 1, "an attempt that was never sent"
        for each in streams:
            replica = self.heard.get((each.request_id, each.attempt), "")
            assert (each.replica, each.worker_incarnation) == (replica, replica and f"{replica}-life")
        if self.reliable:
            missing = [key for key in keys if key not in self.runs]
        else:  # lies: what runs is lost, what does not is not
            missing = [key for key in [*keys, *self.runs] if self.rng.random() < 0.3]
        refusals = self.rng.choices(self.refusals, k=2) if self.refusals else []
        placed = tuple(self.told(run, self.rng.random() < 0.5) for run in self.runs.values())
        self.refused(self.ledger.announced(AnnounceReply(tuple(missing), tuple(refusals), (), placed)))

    def check(self) -> None:
        assert len(self.ledger) == sum(client.waits for client in self.clients.values())
        for client in self.clients.values():
            assert client.num_ends <= 1
            assert len(client.tokens) <= client.wanted.sampling.max_new_tokens
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
                    self.close(self.rng.choice(["unknown", *self.clients]))
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
    assert announced(network.ledger) == ()
    assert network.ledger.announce().sums == KeySums().packed()
    assert network.runs == {}, "a worker runs on for no client"
