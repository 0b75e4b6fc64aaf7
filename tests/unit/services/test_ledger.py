"""The open requests of an ingress replica: whatever is lost on the way, a stream has no gap, no repeat and one end."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.forecast import QUANTILES, Forecast
from core.messages import AnnounceReply, DeltaLogprobs, Key, OpenRequest, Placed, Refusal, SubmitReply, TokenDelta
from core.request import Request, SamplingParams
from services.ledger import ABORT_AGAIN_S, MAX_ATTEMPTS, RequestLedger


def request(name: str = "r", prompt: int = 4, out: int = 6) -> Request:
    return Request(name, 0, "i", (1,) * prompt, SamplingParams(out))


def delta(name: str, start: int, *tokens: int, attempt: int = 0, finish: str | None = None) -> TokenDelta:
    return TokenDelta(name, attempt, start, tokens, "x" * len(tokens), finish, "broken" if finish == "error" else None)


def placed(name: str, attempt: int = 0, replica: str = "a", incarnation: str = "w1") -> SubmitReply:
    return SubmitReply((Placed(name, attempt, replica, incarnation),), ())


def refusal(name: str, attempt: int = 0) -> Refusal:
    return Refusal(name, attempt, "max_tokens", "too long")


def lost(*keys: Key) -> AnnounceReply:
    return AnnounceReply(lost=keys, refusals=(), replicas=())


def running(*names: str, replica: str = "a") -> RequestLedger:
    """A ledger whose requests have been sent and placed."""
    ledger = RequestLedger("i")
    for name in names:
        ledger.open(request(name))
    ledger.take_outgoing()
    for name in names:
        ledger.submitted(placed(name, replica=replica))
    return ledger


def receive(ledger: RequestLedger, *deltas: TokenDelta, now: float = 0.0) -> list[TokenDelta]:
    return ledger.receive("a", "w1", deltas, now)


def replica(ledger: RequestLedger, name: str) -> str:
    """Where the announcement says that a request runs."""
    return next(each.replica for each in ledger.announce().open if each.request_id == name)


def taken(ledger: RequestLedger) -> list[tuple[str, int, tuple[int, ...]]]:
    """(id, attempt, known output) of what goes out; aborts are not expected."""
    requests, aborts = ledger.take_outgoing()
    assert aborts == ()
    return [(each.request_id, each.attempt, each.output_ids) for each in requests]


def test_a_request_goes_out_once() -> None:
    ledger = RequestLedger("i")
    assert not ledger.has_outgoing
    ledger.open(request("r"))
    ledger.open(request("s"))
    assert (len(ledger), ledger.has_outgoing) == (2, True)
    assert ledger.take_outgoing() == ((request("r"), request("s")), ())
    assert not ledger.has_outgoing
    assert ledger.take_outgoing() == ((), ())


def test_tokens_in_order_reach_the_client_and_the_last_closes_the_request() -> None:
    ledger = running("r")
    first, last = delta("r", 0, 7, 8), delta("r", 2, 9, finish="stop")
    assert receive(ledger, first) == [first]
    assert receive(ledger, last) == [last]
    assert len(ledger) == 0
    assert (ledger.has_outgoing, ledger.num_resumed) == (False, 0)


@pytest.mark.parametrize("finish", ["stop", "length", "error"])
def test_an_end_is_told_once(finish: str) -> None:
    ledger = running("r")
    last = delta("r", 0, 7, finish=finish)
    assert receive(ledger, last, last) == [last]
    assert receive(ledger, last) == []
    assert not ledger.has_outgoing, "nobody is told to abort what has ended"


def test_where_a_request_runs_is_known_from_the_answer_or_from_its_first_tokens() -> None:
    ledger = RequestLedger("i")
    ledger.open(request("r"))
    ledger.open(request("s"))
    ledger.take_outgoing()
    assert replica(ledger, "r") == ""
    ledger.submitted(placed("r", replica="b"))
    receive(ledger, delta("s", 0, 1))
    assert (replica(ledger, "r"), replica(ledger, "s")) == ("b", "a")


def test_tokens_may_come_from_where_an_open_request_runs() -> None:
    ledger = running("r", replica="b")
    assert (ledger.runs_on("b"), ledger.runs_on("a")) == (True, False)
    ledger.worker_lost("b")
    assert not ledger.runs_on("b")
    taken(ledger)
    ledger.submitted(placed("r", 1, replica="a"))
    assert ledger.runs_on("a")
    ledger.close("r", 0.0)
    assert not ledger.runs_on("a")


def test_an_answer_that_it_waits_does_not_undo_what_tokens_have_told() -> None:
    ledger = running("r")
    ledger.submitted(placed("r", replica="", incarnation=""))
    assert replica(ledger, "r") == "a"


def test_where_a_request_runs_that_waited_is_known_from_the_answer_to_an_announcement() -> None:
    ledger = RequestLedger("i")
    ledger.open(request("r"))
    ledger.take_outgoing()
    ledger.submitted(placed("r", replica="", incarnation=""))
    ledger.announced(AnnounceReply((), (), ("b",), (Placed("r", 0, "b", "w2"), Placed("r", 1, "c", "w3"))))
    assert replica(ledger, "r") == "b"
    ledger.worker_lost("b")
    assert [each.attempt for each in ledger.take_outgoing()[0]] == [1]


def test_an_answer_about_an_older_attempt_is_ignored() -> None:
    ledger = running("r")
    ledger.worker_lost("a")
    ledger.submitted(placed("r", 0, replica="old"))
    assert not ledger.runs_on("old")
    assert taken(ledger) == [("r", 1, ())]
    ledger.submitted(placed("r", 0, replica="old"))
    assert replica(ledger, "r") == ""


def test_a_router_that_died_with_requests_in_its_hands_gets_them_again_under_a_higher_attempt() -> None:
    ledger = RequestLedger("i")
    ledger.open(request("r"))
    requests, _ = ledger.take_outgoing()
    ledger.submit_failed(requests)
    assert taken(ledger) == [("r", 1, ())]
    assert ledger.num_resumed == 1


def test_a_submission_that_failed_after_all_of_it_was_answered_changes_nothing() -> None:
    ledger = running("r", "s", "t")
    ledger.worker_lost("a")
    taken(ledger)
    receive(ledger, delta("s", 0, 7, attempt=1, finish="stop"))
    ledger.close("t", 0.0)
    ledger.take_outgoing()
    ledger.submit_failed([request("r"), request("s"), request("t")])
    assert not ledger.has_outgoing


def test_what_ran_on_a_lost_worker_is_resumed_where_the_tokens_of_its_client_end() -> None:
    ledger = running("r")
    receive(ledger, delta("r", 0, 7, 8))
    ledger.worker_lost("a")
    assert taken(ledger) == [("r", 1, (7, 8))]
    assert replica(ledger, "r") == ""
    rest = delta("r", 2, 9, attempt=1)
    assert ledger.receive("b", "w2", [rest], 0.0) == [rest]
    ledger.worker_lost("b")
    assert taken(ledger) == [("r", 2, (7, 8, 9))]


def test_log_probabilities_have_neither_gap_nor_repeat_after_a_loss() -> None:
    """They come with their tokens: what is dropped is dropped with them."""

    def logged(start: int, attempt: int) -> TokenDelta:
        prompt = (((1,), (-0.5,)),) if start == 0 else ()
        told = DeltaLogprobs((((start,), (-float(start),)),), prompt)
        return dataclasses.replace(delta("r", start, start, attempt=attempt), logprobs=told)

    ledger = running("r")
    shown = receive(ledger, logged(0, 0), logged(1, 0))
    ledger.worker_lost("a")
    assert taken(ledger) == [("r", 1, (0, 1))]
    ledger.submitted(placed("r", 1))
    shown += receive(ledger, logged(2, 0), logged(2, 1), logged(3, 1))
    found = [each.logprobs for each in shown if each.logprobs is not None]
    assert [each.output[0][0] for each in found] == [(0,), (1,), (2,), (3,)]
    assert [len(each.prompt) for each in found] == [1, 0, 0, 0]


def test_a_lost_worker_takes_nothing_that_runs_elsewhere_or_waits() -> None:
    ledger = running("r", replica="b")
    ledger.open(request("s"))
    ledger.take_outgoing()
    ledger.worker_lost("a")
    assert not ledger.has_outgoing


def test_a_worker_lost_twice_before_the_request_goes_out_is_one_attempt() -> None:
    ledger = running("r")
    ledger.worker_lost("a")
    ledger.worker_lost("a")
    assert taken(ledger) == [("r", 1, ())]


def test_a_resumed_request_keeps_prompt_sampling_and_bound() -> None:
    ledger = running("r")
    receive(ledger, delta("r", 0, 7))
    ledger.worker_lost("a")
    (resumed,), _ = ledger.take_outgoing()
    original = request("r")
    assert (resumed.prompt_ids, resumed.sampling, resumed.ingress_id) == (original.prompt_ids, original.sampling, "i")
    assert resumed.max_total_len == original.max_total_len


@pytest.mark.parametrize("start", [0, 1, 3, 9], ids=["repeat", "overlap", "gap", "wide gap"])
def test_a_gap_or_a_repeat_is_not_shown_and_resumes(start: int) -> None:
    ledger = running("r")
    receive(ledger, delta("r", 0, 7, 8))
    assert receive(ledger, delta("r", start, 9)) == []
    assert taken(ledger) == [("r", 1, (7, 8))]


def test_after_a_gap_nothing_more_of_that_attempt_is_shown() -> None:
    ledger = running("r")
    assert receive(ledger, delta("r", 1, 8), delta("r", 0, 7), delta("r", 1, 8, finish="length")) == []
    requests, aborts = ledger.take_outgoing()
    assert [(each.attempt, each.output_ids) for each in requests] == [(1, ())]
    assert aborts == (("r", 0),), "it still runs: the client's request is the new attempt"


def test_an_end_after_a_gap_is_no_end() -> None:
    ledger = running("r")
    assert receive(ledger, delta("r", 4, 9, finish="stop")) == []
    assert taken(ledger) == [("r", 1, ())]


def test_tokens_of_an_older_attempt_are_dropped_and_it_is_aborted() -> None:
    ledger = running("r")
    ledger.worker_lost("a")
    taken(ledger)
    assert receive(ledger, delta("r", 0, 7)) == []
    assert ledger.take_outgoing() == ((), (("r", 0),))
    good = delta("r", 0, 7, attempt=1)
    assert receive(ledger, good) == [good]


def test_tokens_of_an_unknown_request_are_dropped_and_it_is_aborted() -> None:
    ledger = RequestLedger("i")
    assert receive(ledger, delta("gone", 3, 7, attempt=5)) == []
    assert ledger.take_outgoing() == ((), (("gone", 5),))


def test_the_end_of_an_older_attempt_needs_no_abort() -> None:
    ledger = running("r")
    ledger.worker_lost("a")
    taken(ledger)
    assert receive(ledger, delta("r", 0, 7, finish="length")) == []
    assert not ledger.has_outgoing
    assert len(ledger) == 1


def test_an_attempt_that_goes_on_is_aborted_at_most_once_a_second() -> None:
    ledger = RequestLedger("i")
    aborted_at = []
    for now in (0.0, 0.4, 0.99, 1.0, 1.5, 2.5):
        receive(ledger, delta("gone", 0, 7), now=now)
        if ledger.take_outgoing()[1]:
            aborted_at.append(now)
    assert aborted_at == [0.0, 1.0, 2.5]
    receive(ledger, delta("other", 0, 7), now=2.6)
    assert ledger.take_outgoing()[1] == (("other", 0),), "another attempt has a clock of its own"


def test_aborts_of_long_ago_are_not_kept() -> None:
    ledger = RequestLedger("i")
    for i in range(5000):
        receive(ledger, delta(f"gone{i}", 0, 7), now=i * 0.1)
        ledger.take_outgoing()
    assert len(ledger._aborted_at) <= 1025


def test_an_abort_nobody_asked_for_resumes() -> None:
    ledger = running("r")
    receive(ledger, delta("r", 0, 7))
    assert receive(ledger, delta("r", 1, finish="abort")) == []
    assert taken(ledger) == [("r", 1, (7,))]


def test_a_request_that_has_lost_too_many_workers_is_given_up() -> None:
    ledger = running("r", "s")
    for attempt in range(MAX_ATTEMPTS):
        assert ledger.take_given_up() == []
        receive(ledger, delta("r", 0, attempt=attempt, finish="abort"))
        taken(ledger)
    assert ledger.take_given_up() == ["r"]
    assert ledger.take_given_up() == [], "said once"
    assert len(ledger) == 1


def test_a_refusal_ends_its_request() -> None:
    ledger = running("r", "s")
    assert ledger.submitted(SubmitReply((), (refusal("r"),))) == [refusal("r")]
    assert len(ledger) == 1
    assert ledger.submitted(SubmitReply((), (refusal("r"),))) == []
    assert ledger.announced(AnnounceReply((), (refusal("s"),), ())) == [refusal("s")]
    assert len(ledger) == 0
    assert not ledger.has_outgoing, "nobody runs it: nothing to abort"


def test_a_refusal_said_twice_in_one_answer_is_one() -> None:
    ledger = running("r")
    assert ledger.announced(AnnounceReply((), (refusal("r"), refusal("r")), ())) == [refusal("r")]


def test_a_refusal_of_an_older_attempt_or_of_a_closed_request_is_ignored() -> None:
    ledger = running("r")
    ledger.worker_lost("a")
    assert ledger.submitted(SubmitReply((), (refusal("r", 0), refusal("unknown")))) == []
    assert taken(ledger) == [("r", 1, ())]


def test_a_request_closed_before_it_went_out_is_nobodys_business() -> None:
    ledger = RequestLedger("i")
    ledger.open(request("r"))
    ledger.close("r", 0.0)
    assert (len(ledger), ledger.has_outgoing) == (0, False)


def test_a_request_closed_after_it_went_out_is_aborted() -> None:
    ledger = running("r")
    ledger.close("r", 0.0)
    assert ledger.has_outgoing
    assert ledger.take_outgoing() == ((), (("r", 0),))
    assert receive(ledger, delta("r", 0, 7), now=0.5) == []
    assert not ledger.has_outgoing, "the abort is on its way"


def test_closing_what_has_ended_or_was_never_there_does_nothing() -> None:
    ledger = running("r")
    receive(ledger, delta("r", 0, 7, finish="stop"))
    ledger.close("r", 0.0)
    ledger.close("unknown", 0.0)
    assert not ledger.has_outgoing


def test_a_request_closed_between_two_attempts_is_aborted_once_the_old_one_is_heard() -> None:
    ledger = running("r")
    receive(ledger, delta("r", 5, 7))  # a gap: the attempt is replaced, and may well run on
    ledger.close("r", 0.0)
    assert ledger.take_outgoing() == ((), ())
    receive(ledger, delta("r", 6, 8))
    assert ledger.take_outgoing() == ((), (("r", 0),))


def test_an_announcement_holds_what_was_sent_and_is_open() -> None:
    ledger = running("r", "s", "t")
    receive(ledger, delta("r", 0, 7, 8), delta("s", 0, 7, finish="stop"))
    ledger.close("t", 0.0)
    ledger.open(request("new"))
    announcement = ledger.announce()
    assert announcement.ingress_id == "i"
    assert announcement.open == (OpenRequest("r", 0, "a", "w1", 10),)


def test_an_announcement_leaves_out_an_attempt_that_has_not_been_sent() -> None:
    ledger = running("r")
    receive(ledger, delta("r", 0, 7, 8))
    ledger.worker_lost("a")
    assert ledger.announce().open == ()
    taken(ledger)
    assert ledger.announce().open == (OpenRequest("r", 1, "", "", 8),), "prompt, and the rest of the output"


def test_what_nobody_runs_is_resumed_once() -> None:
    ledger = running("r", "s")
    receive(ledger, delta("r", 0, 7))
    assert ledger.announced(lost(("r", 0), ("r", 0), ("s", 3), ("unknown", 0))) == []
    assert taken(ledger) == [("r", 1, (7,))]
    ledger.announced(lost(("r", 0)))
    assert not ledger.has_outgoing, "that was the attempt before"


def test_a_late_loss_before_the_new_attempt_goes_out_changes_nothing() -> None:
    ledger = running("r")
    ledger.announced(lost(("r", 0)))
    ledger.announced(lost(("r", 0), ("r", 1)))
    assert taken(ledger) == [("r", 1, ())]


# An adversarial network --------------------------------------------------------------------------------------------


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
    """A house that delivers everything late, twice, in any order, or not at all, and says what is not so."""

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
        self.ledger.open(request(name, out=self.clients[name].out))

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
            assert client.waits, "nobody waits for this"
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
    assert network.runs == {}, "a worker runs on for nobody"


def test_a_forecast_goes_out_with_its_request_or_after_it() -> None:
    forecast = Forecast(5.0, (5.0,) * len(QUANTILES), 1, "test", 1)
    ledger = RequestLedger("i")
    ledger.open(request("early"))
    assert ledger.foresee("early", forecast) is None
    assert ledger.foresee("unknown", forecast) is None
    (sent,), _ = ledger.take_outgoing()
    assert sent.forecast == forecast

    ledger = running("late")
    assert ledger.foresee("late", forecast) == 0
    ledger.worker_lost("a")
    assert ledger.foresee("late", forecast) is None
    (again,), _ = ledger.take_outgoing()
    assert (again.attempt, again.forecast) == (1, forecast)
