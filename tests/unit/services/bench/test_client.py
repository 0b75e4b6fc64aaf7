"""The client against a server that streams, fails, stalls and closes early."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from farsight.core.errors import FarsightError
from farsight.services.bench.answers import Answer, StreamReader
from farsight.services.bench.client import TargetModel, find_model
from farsight.services.bench.load import Connection, RunResult, measure, run_async
from farsight.services.bench.targets import BenchTarget, BodyForm, make_call
from farsight.services.bench.workloads import drawn_arrivals, make_workload
from tests.unit.services.bench.fake_server import LONG_S, TOKENS_PER_CHUNK, FakeServer, fake_server

NUM_REQUESTS = 6


@pytest.fixture(scope="module")
def shared_server() -> Iterator[FakeServer]:
    with fake_server() as server:
        yield server


@pytest.fixture
def server(shared_server: FakeServer) -> FakeServer:
    shared_server.begin()
    return shared_server


def load(
    server: FakeServer, form: BodyForm, how: int | list[float] = 3, timeout_s: float = LONG_S, keep_alive: bool = False
) -> RunResult:
    target = BenchTarget("fake", server.base_url + "/v1/", "fake", os.getpid(), api_key="secret")
    calls = [make_call(each, "fake", form, salt=1, most_tokens=9) for each in make_workload("uniform", NUM_REQUESTS, 1)]
    return measure(target, calls, Connection(form, timeout_s, keep_alive), how)


@pytest.mark.parametrize("keep_alive", [False, True])
def test_a_closed_loop(server: FakeServer, keep_alive: bool) -> None:
    server.wait_open = 3  # else the first may be answered before the others have been sent
    run = load(server, BodyForm(vocab_size=100), keep_alive=keep_alive)
    assert [answer.failure for answer in run.answers] == [None] * NUM_REQUESTS
    assert server.most_open == 3
    wanted = {body["max_tokens"] for body in server.bodies}
    for answer in run.answers:
        assert answer.num_tokens in wanted
        assert len(answer.chunks_at) == -(-answer.num_tokens // TOKENS_PER_CHUNK)
        assert 0 < answer.ttft_s <= answer.jct_s
        assert answer.mtpot_s is not None and answer.mtpot_s >= 0
    assert run.wall_s > 0 and run.usage.client_s > 0
    assert run.usage.server_s is not None
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer secret"}


def test_chunks_are_timed_as_they_come(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is sent when the one before has been read: a client that gets no processor would read several at once."""
    under_way: list[Answer] = []
    begin = StreamReader.__init__

    def noted(reader: StreamReader, answer: Answer) -> None:
        begin(reader, answer)
        under_way[:] = [answer]

    monkeypatch.setattr(StreamReader, "__init__", noted)
    server.num_read = lambda: len(under_way[0].chunks_at) if under_way and not under_way[0].ended_at else 0
    run = load(server, BodyForm(), how=1)
    for answer in run.answers:
        assert answer.failure is None and len(answer.chunks_at) > 2
        assert min(answer.gaps_s) >= 0.001 and answer.mtpot_s == max(answer.gaps_s)


def test_an_open_loop_keeps_to_its_times(server: FakeServer) -> None:
    """However many are under way: none is answered before all are."""
    server.wait_open = NUM_REQUESTS
    due_s = drawn_arrivals(NUM_REQUESTS, rate=50.0, cv=1.0, seed=1)
    run = load(server, BodyForm(), due_s)
    for answer, due in zip(sorted(run.answers, key=lambda answer: answer.id), due_s, strict=True):
        assert answer.sent_at - run.began_at >= due - 0.002  # timers of uvloop count milliseconds
        assert answer.late_s == pytest.approx(max(0.0, answer.sent_at - run.began_at - due), abs=1e-6)


def test_hidden_lengths_are_what_comes(server: FakeServer) -> None:
    run = load(server, BodyForm(hidden_max_tokens=500))
    assert {body["max_tokens"] for body in server.bodies} == {500}
    assert [answer.failure for answer in run.answers] == [None] * NUM_REQUESTS


def test_a_chat(server: FakeServer) -> None:
    run = load(server, BodyForm(endpoint="chat", ignore_eos=False, usage=False))
    assert [answer.failure for answer in run.answers] == [None] * NUM_REQUESTS
    assert all(body["messages"][0]["role"] == "user" for body in server.bodies)


@pytest.mark.parametrize(
    ("fault", "kind", "detail"),
    [
        ("full", "HTTP 503", "full"),
        ("close", "stream cut", ""),
        ("error", "error in the stream", "out of memory"),
        ("garbage", "malformed stream", ""),
        ("short", "wrong length", "tokens instead of"),
    ],
)
def test_failures_have_their_kind(server: FakeServer, fault: str, kind: str, detail: str) -> None:
    run = load(server, BodyForm(extra={"user": fault}))
    assert len(run.answers) == NUM_REQUESTS
    for answer in run.answers:
        assert answer.failure is not None and answer.failure.kind == kind
        assert detail in answer.failure.detail


def test_a_stall_ends_with_the_timeout(server: FakeServer) -> None:
    for timeout_s in (0.3, 3.0, 30.0):  # a busy machine may need longer for what comes before the stall
        run = load(server, BodyForm(extra={"user": "stall"}), how=NUM_REQUESTS, timeout_s=timeout_s)
        assert {answer.failure.kind for answer in run.answers if answer.failure} == {"timeout"}
        if all(len(answer.chunks_at) == 2 for answer in run.answers):
            break
    assert all(len(answer.chunks_at) == 2 and answer.failure for answer in run.answers)


def test_nobody_listens() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        server = FakeServer()
        server.base_url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        run = load(server, BodyForm())
        assert {answer.failure.kind for answer in run.answers if answer.failure} == {"cannot connect"}
        with pytest.raises(FarsightError, match="--model"):
            run_async(find_model(BenchTarget("x", server.base_url, "")))


def test_the_model_is_asked_for(server: FakeServer) -> None:
    assert run_async(find_model(BenchTarget("x", server.base_url, ""))) == TargetModel("fake", 0)
    server.max_model_len = 512
    assert run_async(find_model(BenchTarget("x", server.base_url, ""))) == TargetModel("fake", 512)
    assert run_async(find_model(BenchTarget("x", server.base_url, "fake"))) == TargetModel("fake", 512)
    assert run_async(find_model(BenchTarget("x", server.base_url, "unlisted"))) == TargetModel("unlisted", 0)
