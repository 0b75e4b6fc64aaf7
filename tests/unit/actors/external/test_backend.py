"""The component that stands for another server: real HTTP to a server that misbehaves as told, and our own messages."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from farsight.actors.external.backend import OpenAIBackend
from farsight.actors.runtime.component import ComponentContext
from farsight.actors.runtime.peer import Site
from farsight.actors.worker.token_channels import TokenChannels
from farsight.core.codec import decode
from farsight.core.config.actors import ReplicaConfig
from farsight.core.config.engine import ModelConfig
from farsight.core.config.load import FarsightConfig
from farsight.core.decisions import unpack_decisions
from farsight.core.errors import ConfigError
from farsight.core.messages.fleet import ReplicaNews, ReplicaState
from farsight.core.messages.log import LogRecords, RequestTrace, TraceQuery
from farsight.core.messages.plans import FinishedSequence, StartedRequest, WorkerReady
from farsight.core.messages.requests import Key, Keys, Refusals, Submit
from farsight.core.messages.tokens import TokenDelta, TokenPoll
from farsight.core.request import Origin, PromptSource, Request, SamplingParams, SequenceStatus
from farsight.engine.vocabulary import PromptDecoder
from farsight.services.launch.launch import EMBEDDED_MODEL
from tests.free_ports import free_port
from tests.unit.actors.components import LONG_S, until
from tests.unit.actors.openai_double import MODEL, OpenAIDouble

REQUEST = Request("i-0", 0, "i", (5, 6, 7), SamplingParams(9), origin=Origin("cmpl-0"))


class Listener:
    """The Router and the log store, as far as they only listen."""

    def __init__(self) -> None:
        self.states: list[ReplicaState] = []
        self.started: list[StartedRequest] = []
        self.ended: list[FinishedSequence] = []
        self.traces: list[RequestTrace] = []
        self.hears = asyncio.Event()
        self.hears.set()

    async def answer(self, method: str, data: bytes) -> bytes:
        match method:
            case "replica_state":
                await self.hears.wait()
                self.states.append(decode(data, ReplicaState))
            case "replica_news":
                news = decode(data, ReplicaNews)
                self.started += news.started
                self.ended += news.finished
            case "append":
                self.traces += decode(data, LogRecords).traces
        return b""

    @property
    def ready(self) -> WorkerReady | None:
        return self.states[-1].ready if self.states else None


@dataclass
class Replica:
    """A running component and its one ingress replica."""

    component: OpenAIBackend
    listener: Listener
    registry: CollectorRegistry
    deltas: list[TokenDelta] = field(default_factory=list)
    slow: tuple[str, ...] = ()
    ack_seq: int = 0

    async def poll(self) -> None:
        """Takes tokens for ever, as an ingress replica does."""
        while True:
            reply = await self.component.poll_tokens(TokenPoll("i", self.ack_seq, self.slow))
            for batch in reply.batches:
                if batch.seq > self.ack_seq:
                    self.ack_seq = batch.seq
                    self.deltas += batch.deltas

    async def submit(self, *requests: Request) -> Refusals:
        return await self.component.submit(Submit(requests))

    async def abort(self, *keys: Key) -> None:
        await self.component.abort(Keys(keys))

    async def end_of(self, request: Request = REQUEST) -> list[TokenDelta]:
        """All deltas of a request, once the last is there."""
        await until(lambda: any(each.finish_reason for each in self._of(request)))
        return self._of(request)

    def _of(self, request: Request) -> list[TokenDelta]:
        return [each for each in self.deltas if each.request_id == request.request_id]

    def failures(self, kind: str) -> float:
        labels = {"model_name": MODEL, "engine": "backend-0", "kind": kind}
        return self.registry.get_sample_value("farsight:backend_failures_total", labels) or 0.0

    def state(self, state: str) -> float | None:
        labels = {"model_name": MODEL, "engine": "backend-0", "state": state}
        return self.registry.get_sample_value("farsight:backend_state", labels)


@asynccontextmanager
async def backend(url: str, **config: Any) -> AsyncIterator[Replica]:
    """A component for the server at ``url``; ``config`` are settings of its table."""
    listener, registry = Listener(), CollectorRegistry()
    table = ReplicaConfig("openai", url, **config)
    site = Site(FarsightConfig(ModelConfig(name=MODEL, replicas=0), replica=(table,)), str(EMBEDDED_MODEL), "fused")
    peers = site.peers({"router": listener, "log-store": listener})
    component = OpenAIBackend(ComponentContext("backend-0", site, 0, peers, registry))
    replica = Replica(component, listener, registry)
    await component.start()
    polling = asyncio.create_task(replica.poll())
    try:
        async with asyncio.timeout(LONG_S):
            yield replica
        assert not component.failed.done(), component.failed
    finally:
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)
        await component.stop()


@asynccontextmanager
async def served(double: OpenAIDouble | None = None, **config: Any) -> AsyncIterator[tuple[OpenAIDouble, Replica]]:
    """A server and its replica, which takes requests."""
    async with (double or OpenAIDouble()).running() as running, backend(running.url, **config) as replica:
        await until(lambda: replica.listener.ready is not None)
        yield running, replica


async def test_a_request_is_answered() -> None:
    double = OpenAIDouble(usage={"completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}})
    async with served(double, max_num_seqs=8) as (server, replica):
        assert await replica.submit(REQUEST) == Refusals(())
        deltas = await replica.end_of()
        assert "".join(each.text for each in deltas) == "one two three"
        assert [each.num_unnamed for each in deltas] == [1, 1, 1, 1], "the usage knows of one more"
        assert [each.start for each in deltas] == [0, 1, 2, 3]
        assert (deltas[-1].finish_reason, deltas[-1].cached_len) == ("stop", 2)
        assert (server.bodies[0]["prompt"], server.bodies[0]["max_tokens"]) == ([5, 6, 7], 9)
        ready = replica.listener.ready
        assert ready is not None and ready.external and (ready.max_model_len, ready.vocab_size) == (1000, 264)
        assert ready.num_blocks * ready.block_size == 8 * 1000
        await until(lambda: bool(replica.listener.ended))
        assert replica.listener.ended == [FinishedSequence("i-0", 0, SequenceStatus.FINISHED_STOPPED, 4, 2)]
        assert [each.cached_len for each in replica.listener.started] == [2]
        await until(lambda: bool(replica.listener.traces))
        kinds = [each.kind for each in unpack_decisions(replica.listener.traces[0].decisions)]
        assert kinds == ["arrived", "sent", "server_ended"]
        assert (replica.component.state, replica.component.queue, replica.component.breaker) == ("ready", 0, "closed")
        assert replica.component.url == server.url


async def test_limits_are_told_apart_from_stops() -> None:
    async with served(OpenAIDouble(finish_reason="length", usage=None)) as (_, replica):
        await replica.submit(REQUEST)
        assert (await replica.end_of())[-1].finish_reason == "length"
        await until(lambda: bool(replica.listener.ended))
        assert replica.listener.ended == [FinishedSequence("i-0", 0, SequenceStatus.FINISHED_LENGTH, 3)]
        assert not replica.listener.started, "it is not known what it had cached"


@pytest.mark.parametrize("chats", [True, False])
async def test_a_server_may_take_text_only(chats: bool) -> None:
    async with served(OpenAIDouble(chats=chats), prompt="text") as (server, replica):
        chat = dataclasses.replace(REQUEST, source=PromptSource(messages=(("user", "Hi"),)))
        text = dataclasses.replace(REQUEST, request_id="i-1", source=PromptSource("Hi"))
        tokens = dataclasses.replace(REQUEST, request_id="i-2")
        for each in (chat, text, tokens):
            await replica.submit(each)
            deltas = await replica.end_of(each)
            if each is chat and not chats:
                assert "HTTP 404" in str(deltas[-1].error), "it has no chats, and is well all the same"
            else:
                assert "".join(delta.text for delta in deltas) == "one two three"
        asked = [body.get("messages") or body["prompt"] for body in server.bodies]
        said = PromptDecoder(EMBEDDED_MODEL).decode(REQUEST.prompt_ids)
        assert asked == ([[{"role": "user", "content": "Hi"}]] if chats else []) + ["Hi", said]
        assert replica.component.breaker == "closed"


async def test_a_stream_without_an_end_is_broken_off() -> None:
    async with served() as (server, replica):
        server.finish_reason = None
        await replica.submit(REQUEST)
        assert (await replica.end_of())[-1].error == "backend-0: the stream ended before the answer did"


async def test_a_key_is_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_BACKEND_KEY", "secret")
    async with served(api_key_env="TEST_BACKEND_KEY") as (server, replica):
        assert server.keys == {"Bearer secret"}
        assert "secret" not in repr(replica.component.context.site)
    monkeypatch.delenv("TEST_BACKEND_KEY")
    with pytest.raises(ConfigError, match=r"replica.api_key_env: got 'TEST_BACKEND_KEY'"):
        async with backend("http://127.0.0.1:1", api_key_env="TEST_BACKEND_KEY"):
            pass


async def test_what_is_too_long_for_it_is_refused() -> None:
    async with served(max_model_len=20) as (_, replica):
        assert replica.listener.ready is not None and replica.listener.ready.max_model_len == 20
        refusals = await replica.submit(dataclasses.replace(REQUEST, sampling=SamplingParams(18)))
        assert [each.field for each in refusals.refusals] == ["max_tokens"]


async def test_a_server_that_does_not_say_how_long_is_not_used() -> None:
    async with OpenAIDouble(models=[{"id": MODEL}]).running() as server:
        async with backend(server.url) as replica:
            await until(lambda: "set [[replica]] max_model_len" in replica.component.breaker)
            assert replica.component.state == "waiting"
        async with backend(server.url, max_model_len=50) as replica:
            await until(lambda: replica.listener.ready is not None)


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        ({"models": [{"id": "other"}]}, "model", "the server serves 'other', expected 'm'"),
        ({"answers_as": "other"}, "model", "the server answers as model 'other', expected 'm'"),
        ({"health": 500}, "http", "HTTP 500"),
        ({"status": 401}, "auth", "HTTP 401: as told"),
        ({"status": 400}, "request", "HTTP 400: as told"),
        ({"break_after": 0}, "broken", "the connection broke"),
        ({"first_s": math.inf}, "timeout", "no first token within 0.2 s"),
    ],
)
async def test_a_server_that_does_not_pass_its_probe_gets_no_requests(
    wrong: dict[str, Any], kind: str, message: str
) -> None:
    limit_s = 0.2 if kind == "timeout" else LONG_S
    async with (
        OpenAIDouble(**wrong).running() as server,
        backend(server.url, first_token_timeout_s=limit_s) as replica,
    ):
        await until(lambda: message in replica.component.breaker)  # a probe before it may have met a slow machine
        assert replica.failures(kind) > 0
        assert (replica.state("closed"), replica.component.state, replica.listener.ready) == (0, "waiting", None)
        await replica.submit(REQUEST)
        returned = await replica.end_of()
        assert [each.finish_reason for each in returned] == ["abort"], "it goes elsewhere at once"


async def test_only_a_breaker_that_opens_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "farsight.actors.external.backend")
    async with served(token_timeout_s=0.1):
        pass
    (line,) = [each for each in caplog.records if "the breaker is" in each.getMessage()]
    assert (line.levelname, line.getMessage().rpartition(": ")[2]) == ("INFO", "the breaker is closed")


async def test_a_server_without_a_health_page_is_well() -> None:
    async with served(OpenAIDouble(health=404)) as (_, replica):
        assert replica.component.breaker == "closed"


async def test_a_server_that_is_down_is_used_once_it_is_up() -> None:
    port = free_port()
    async with backend(f"http://127.0.0.1:{port}") as replica:
        await until(lambda: replica.failures("connect") > 0)
        assert "cannot connect" in replica.component.breaker
        async with OpenAIDouble().running(port):
            await until(lambda: replica.listener.ready is not None)
            await replica.submit(REQUEST)
            assert (await replica.end_of())[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        ({"first_s": math.inf}, "timeout", "no first token within 0.3 s"),
        ({"break_after": 0}, "broken", "the connection broke during the answer"),
        ({"status": 503}, "busy", "HTTP 503: as told"),
        ({"status": 500}, "http", "HTTP 500: as told"),
        ({"answers_as": "other"}, "model", "the server answers as model 'other', expected 'm'"),
    ],
)
async def test_before_its_first_token_a_request_is_given_back(wrong: dict[str, Any], kind: str, message: str) -> None:
    limit_s = 0.3 if kind == "timeout" else LONG_S
    async with served(first_token_timeout_s=limit_s) as (server, replica):
        before = replica.failures(kind)  # of probes that met a slow machine
        vars(server).update(wrong)
        await replica.submit(REQUEST)
        (returned,) = await replica.end_of()
        assert (returned.finish_reason, returned.error, returned.start) == ("abort", message, 0)
        assert replica.failures(kind) == before + 1
        await until(lambda: bool(replica.listener.ended))
        assert replica.listener.ended == [FinishedSequence("i-0", 0, SequenceStatus.FINISHED_ABORTED, 0)]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"next_s": math.inf}, "no next token within 0.3 s"),
        ({"break_after": 1}, "the connection broke during the answer"),
    ],
)
async def test_after_its_first_token_a_request_fails_for_good(wrong: dict[str, Any], message: str) -> None:
    limit_s = 0.3 if "next_s" in wrong else LONG_S
    async with served(token_timeout_s=limit_s) as (server, replica):
        vars(server).update(wrong)
        await replica.submit(REQUEST)
        first, last = await replica.end_of()
        assert (first.text, last.finish_reason, last.start) == ("one", "error", 1)
        assert last.error == f"backend-0: {message}"


async def test_three_failures_open_the_breaker_and_the_next_goes_elsewhere_at_once() -> None:
    async with served() as (server, replica):
        server.status = 500
        for index in range(3):
            failing = dataclasses.replace(REQUEST, request_id=f"i-{index}")
            await replica.submit(failing)
            await replica.end_of(failing)
        assert replica.component.breaker == "open: HTTP 500: as told"
        assert (replica.state("open"), replica.failures("http")) == (1, 3)
        await until(lambda: replica.listener.ready is None)
        late = dataclasses.replace(REQUEST, request_id="i-9")
        await replica.submit(late)
        assert (await replica.end_of(late))[-1].error == "HTTP 500: as told"
        assert len(server.bodies) == 3, "it was not asked"
        server.status = 200
        await until(lambda: replica.listener.ready is not None)


async def test_nothing_is_given_back_before_the_router_knows_that_nothing_may_come() -> None:
    async with served() as (server, replica):
        replica.listener.hears.clear()
        server.status = 500
        requests = [dataclasses.replace(REQUEST, request_id=f"i-{index}") for index in range(4)]
        for failing in requests[:3]:
            await replica.submit(failing)
            await until(lambda: replica.component.queue == 0)
        assert "open" in replica.component.breaker
        await replica.submit(requests[3])
        await replica.end_of(requests[1])
        await asyncio.sleep(0.1)
        assert {each.request_id for each in replica.deltas} == {"i-0", "i-1"}, "it would come back again and again"
        replica.listener.hears.set()
        for failing in requests[2:]:
            assert [each.finish_reason for each in await replica.end_of(failing)] == ["abort"]


async def test_a_client_that_leaves_ends_the_request_over_there() -> None:
    async with served() as (server, replica):
        server.next_s = math.inf
        await replica.submit(REQUEST)
        await until(lambda: server.open == 1)
        await replica.abort(("i-0", 0))
        await until(lambda: server.open == 0)
        assert replica.component.queue == 0


async def test_an_ingress_replica_that_has_died_takes_its_requests_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farsight.actors.worker.token_channels.SILENCE_S", math.inf)
    async with served() as (server, replica):
        server.next_s = math.inf
        other = dataclasses.replace(REQUEST, request_id="j-0", ingress_id="j")
        await replica.submit(other)
        await until(lambda: server.open == 1)
        asked: list[str] = []
        living = {"j"}

        async def gone(ingress_ids: Collection[str]) -> frozenset[str]:
            asked.extend(ingress_ids)
            return frozenset(ingress_ids) - living

        replica.component.context = dataclasses.replace(replica.component.context, gone=gone)
        monkeypatch.setattr("farsight.actors.worker.token_channels.SILENCE_S", 0.0)
        monkeypatch.setattr("farsight.actors.external.backend.TICK_S", 0.01)
        await until(lambda: asked.count("j") >= 3)
        assert server.open == 1, "it is silent, but lives"
        living.clear()
        await until(lambda: server.open == 0)


async def test_who_is_sent_waits_for_a_place_there() -> None:
    async with served(max_num_seqs=1) as (server, replica):
        server.next_s = math.inf
        second = dataclasses.replace(REQUEST, request_id="i-1")
        await replica.submit(REQUEST, second)
        await until(lambda: bool(server.bodies))
        traces = (await replica.component.explain(TraceQuery("cmpl-0"))).records
        kinds = [[each.kind for each in unpack_decisions(trace.decisions)] for trace in traces]
        assert kinds == [["arrived", "sent"], ["arrived"]]
        assert (replica.component.queue, len(server.bodies)) == (2, 1)
        server.next_s = 0.0
        await replica.abort(("i-0", 0))
        assert (await replica.end_of(second))[-1].finish_reason == "stop"
        unknown = (await replica.component.unknown(Keys((("i-0", 0), ("i-2", 0))))).keys
        assert unknown == (("i-2", 0),)


async def test_a_client_that_does_not_read_costs_no_deadline() -> None:
    async with served(token_timeout_s=0.3) as (server, replica):
        server.next_s = 0.1
        replica.slow = ("i-0",)
        await until(lambda: replica.component._channels.rests("i", "i-0"))
        await replica.submit(REQUEST)
        # All of it is on its way: no pause of the server's is measured by the deadline.
        await until(lambda: bool(server.bodies) and server.open == 0)
        await asyncio.sleep(0.8)
        assert not any(each.finish_reason for each in replica.deltas)
        replica.slow = ()
        assert "".join(each.text for each in await replica.end_of()) == "one two three"


async def test_channels_forget_who_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farsight.actors.worker.token_channels.FORGET_S", -1.0)
    channels = TokenChannels("life")
    try:
        channels.hear(TokenPoll("i", 0, ("i-0",)))
        assert channels.rests("i", "i-0")
        assert channels.silent(["i"]) == []
        assert channels.rests("i", "i-0"), "who owns requests is not forgotten"
        assert channels.silent([]) == []
        assert not channels.rests("i", "i-0")
    finally:
        channels.close()
