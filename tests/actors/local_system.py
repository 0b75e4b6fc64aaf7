"""A running service without HTTP: real components in real actors, and what tests do to it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import ray
import torch
from prometheus_client.parser import text_string_to_metric_families

from farsight.actors.runtime.hosts import find_host, list_hosts
from farsight.actors.runtime.names import LOG_STORE, SUPERVISOR, actor_name, host_of
from farsight.actors.runtime.peer import Site
from farsight.core.codec import decode, encode
from farsight.core.config.engine import EngineConfig
from farsight.core.config.server import ServerConfig
from farsight.core.messages.log import FinishedRequest, LogPage, LogQuery
from farsight.core.messages.status import ComponentStatus, StatusReply
from farsight.core.request import Origin, SamplingParams
from farsight.engine import Engine
from farsight.engine.sampling.sampler import counter_uniform, warp_logits
from farsight.services.api.requests import unnamed_request
from farsight.services.ingress import overview
from farsight.services.ingress.engine_client import EngineClient
from farsight.services.ingress.ingress import open_client
from tests.unit.engine.small_models import load_reference

LONG_S = 150.0
"""Nothing takes so long, however busy the machine: who waits in vain is to fail, not to hang."""

POLL_S = 0.1
"""Each question for the status costs every component some time, which what is waited for lacks."""

NUM_PROMPTS = 16
NUM_BEFORE_GATE = 5
NUM_BEFORE_RELEASE = 150
"""The worker goes on for as many as a client may leave unread, which is not yet the end."""

NUM_TOKENS = 600
"""The length of a stream that is to be under way while something dies."""

MAX_LEN = 2048
BLOCK_SIZE = 4
ENGINE = EngineConfig(kv_memory="8MiB", block_size=BLOCK_SIZE, max_num_seqs=16, num_threads=1)
PROMPTS = [tuple(range(5 + index, 12 + 2 * index)) for index in range(NUM_PROMPTS)]

T = TypeVar("T")


def sampling(index: int, num_tokens: int = NUM_TOKENS, **fields: Any) -> SamplingParams:
    """How the prompt with that index is sampled: every other one is not greedy."""
    drawn = {"temperature": 0.8, "seed": index} if index % 2 else {}
    return SamplingParams(num_tokens, ignore_eos=True, **{**drawn, **fields})


NEAR_TIE = 1e-4
"""Where two tokens are closer than this, in logits or in drawn mass, rounding decides and either is right."""


class Truth:
    """What the plain Engine says to every prompt; a shorter request gets the beginning of it."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        engine = Engine(model_dir, dtype="float32", engine=ENGINE)
        completions = engine.generate(PROMPTS, [sampling(index) for index in range(NUM_PROMPTS)])
        self.tokens = [completion.token_ids for completion in completions]

    def check(self, index: int, tokens: tuple[int, ...], num_tokens: int = NUM_TOKENS) -> None:
        """These are the tokens of the prompt with that index, as far as they do not hang on rounding."""
        assert len(tokens) == num_tokens, f"stream {index}"
        expected = self.tokens[index]
        parted = next((at for at in range(num_tokens) if tokens[at] != expected[at]), None)
        if parted is not None:
            margin = self._margin(index, parted)
            assert margin < NEAR_TIE, f"stream {index} is another one from token {parted} on, no tie: {margin}"

    def _margin(self, index: int, at: int) -> float:
        """By how much the token was chosen."""
        prompt, params = PROMPTS[index], sampling(index)
        with torch.no_grad():
            logits = load_reference(self._model_dir)(torch.tensor([[*prompt, *self.tokens[index][:at]]])).logits[:, -1]
        if params.greedy:
            best = logits[0].topk(2).values
            return float(best[0] - best[1])
        cumulative = warp_logits(logits, [params]).softmax(-1, dtype=torch.float64).cumsum(-1)
        return float((cumulative - counter_uniform(params.seed, len(prompt) + at)).abs().min())


@dataclass(frozen=True)
class System:
    """One running service."""

    site: Site

    async def ask(self, component: str, method: str, message: Any, reply: type[T]) -> T:
        """A message to a component, or nothing, and its answer."""
        data = b"" if message is None else encode(message)
        with contextlib.closing(self.site.peers()) as peers:
            return decode(await peers.peer(component).call(method, data), reply)

    def host(self, component: str) -> Any:
        """The actor that hosts it."""
        return ray.get_actor(actor_name(host_of(component, self.site.placement)), namespace=self.site.namespace)

    async def metric(self, component: str, name: str, **labels: str) -> float:
        """The sum of a metric over its series with these labels, as the component's process shows it."""
        families = text_string_to_metric_families(await self.host(component).metrics.remote())
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    async def log(self, *request_ids: str) -> list[FinishedRequest]:
        """Their records, once all are there."""
        async with asyncio.timeout(LONG_S):
            while True:
                page = await self.ask(LOG_STORE, "read", LogQuery(0, 10_000), LogPage)
                found = {record.request_id: record for record in page.records}
                if found.keys() >= set(request_ids):
                    return [found[request_id] for request_id in request_ids]
                await asyncio.sleep(POLL_S)

    @asynccontextmanager
    async def client(self, **limits: Any) -> AsyncIterator[EngineClient]:
        """An ingress replica of this process."""
        server = dataclasses.replace(ServerConfig(), **limits)
        site = dataclasses.replace(self.site, config=dataclasses.replace(self.site.config, server=server))
        async with asyncio.timeout(LONG_S):
            client = await open_client(site)
        try:
            yield client
        finally:
            await client.close()

    def end(self) -> None:
        """Kills every actor, the one first that would start the others again. Returns when all are gone."""
        self._kill_host(host_of(SUPERVISOR, self.site.placement))
        deadline = time.monotonic() + LONG_S
        while hosts := list_hosts(self.site.namespace):  # also of one that was about to be started again
            assert time.monotonic() < deadline, f"not gone after {LONG_S} s: {hosts}"
            for host in hosts:
                self._kill_host(host)
            time.sleep(0.02)

    def _kill_host(self, host: str) -> None:
        handle = find_host(host, self.site.namespace)
        if handle is not None:  # else it has ended meanwhile
            ray.kill(handle)


async def eventually(condition: Callable[[], Coroutine[Any, Any, bool]], waited_for: str) -> None:
    """Waits until it is true."""
    deadline = time.monotonic() + LONG_S
    while not await condition():
        assert time.monotonic() < deadline, f"not after {LONG_S} s: {waited_for}"
        await asyncio.sleep(POLL_S)


async def rows(client: EngineClient) -> dict[str, ComponentStatus]:
    """The status by name, without ingress replicas of other tests.

    On a busy machine a component may be shown as dead that lives: it has not answered for a second. And while the
    Supervisor has not, there are as many pieces as there were before, for all that is known.
    """
    return {row.name: row for row in (await client.overview.status()).components if _concerns(client, row)}


async def patient_rows(client: EngineClient) -> dict[str, ComponentStatus]:
    """The same, where every component that lives has all the time that it needs to answer."""
    with patch.object(overview, "TIMEOUT_S", LONG_S):
        return await rows(client)


async def ready_rows(client: EngineClient) -> dict[str, ComponentStatus]:
    """The same, once every component has answered that it is ready."""
    found: dict[str, ComponentStatus] = {}

    async def ready() -> bool:
        nonlocal found
        found = await rows(client)
        return all(row.state == "ready" for row in found.values())

    try:
        await eventually(ready, "every component is ready")
    except AssertionError as error:
        raise AssertionError(f"{error}: {found}") from None
    return found


def _concerns(client: EngineClient, row: ComponentStatus) -> bool:
    return row.kind != "Ingress" or row.name == f"ingress-{client.ingress_id}"


async def wait_whole(client: EngineClient) -> None:
    """Until every component is ready, nobody holds a request and every KV block is free."""
    last: StatusReply | None = None

    async def whole() -> bool:
        nonlocal last
        last = await client.overview.status()
        calm = all(row.state == "ready" and not row.queue for row in last.components if _concerns(client, row))
        return calm and last.kv.free_blocks == last.kv.num_blocks > 0

    try:
        await eventually(whole, "everything is free")
    except AssertionError as error:
        raise AssertionError(f"{error}: {last}") from None


@asynccontextmanager
async def calm_client(system: System) -> AsyncIterator[EngineClient]:
    """One ingress replica; the system is calm before and after."""
    async with system.client() as client:
        await wait_whole(client)
        yield client
        await wait_whole(client)


class Reading:
    """One stream.

    Args:
        gates: The client reads on beyond so many tokens once that is set.
    """

    def __init__(
        self,
        client: EngineClient,
        prompt: tuple[int, ...],
        params: SamplingParams,
        gates: Mapping[int, asyncio.Event] | None = None,
        origin: Origin | None = None,
    ) -> None:
        self._gates, self._origin = gates or {}, origin
        self.tokens: tuple[int, ...] = ()
        self.reason: str | None = None
        self.request_id = ""
        self._task = asyncio.create_task(self._read(client, prompt, params))

    async def _read(self, client: EngineClient, prompt: tuple[int, ...], params: SamplingParams) -> None:
        async with aclosing(client.stream(unnamed_request(prompt, params, origin=self._origin))) as deltas:
            async for delta in deltas:
                assert self.reason is None, "something came after the end"
                assert delta.start == len(self.tokens), "a token is missing or repeated"
                assert delta.error is None
                self.request_id = delta.request_id
                self.tokens += delta.token_ids
                self.reason = delta.finish_reason
                for num_tokens, gate in self._gates.items():
                    if len(self.tokens) >= num_tokens:
                        await gate.wait()

    async def finish(self) -> tuple[int, ...]:
        """All of its tokens."""
        async with asyncio.timeout(LONG_S):
            await self._task
        assert self.reason in ("length", "stop")
        return self.tokens


async def read(
    client: EngineClient, index: int, num_tokens: int = NUM_TOKENS, origin: Origin | None = None, **fields: Any
) -> tuple[int, ...]:
    return await Reading(client, PROMPTS[index], sampling(index, num_tokens, **fields), origin=origin).finish()


@dataclass(frozen=True)
class Load:
    """Streams of every prompt, all of them under way.

    Attributes:
        released: They may come to their end. Until then none does, however long what is to meet them takes: their
            clients read no further than ``NUM_BEFORE_RELEASE``, and before the end the worker lets them rest.
    """

    readings: list[Reading]
    released: asyncio.Event

    def release(self) -> None:
        """What was to meet them has."""
        self.released.set()


@asynccontextmanager
async def under_load(client: EngineClient, truth: Truth) -> AsyncIterator[Load]:
    """Streams of every prompt, all of them under way inside; afterwards each has got exactly what it should.

    Until all have begun none is read on, so that none ends however slow the machine: it rests instead.
    """
    begun, released = asyncio.Event(), asyncio.Event()
    gates = {NUM_BEFORE_GATE: begun, NUM_BEFORE_RELEASE: released}
    readings = [Reading(client, prompt, sampling(index), gates) for index, prompt in enumerate(PROMPTS)]

    async def midway() -> bool:
        return all(len(reading.tokens) >= NUM_BEFORE_GATE for reading in readings)

    await eventually(midway, "every stream has begun")
    begun.set()
    yield Load(readings, released)
    released.set()
    for index, reading in enumerate(readings):
        truth.check(index, await reading.finish())
    await wait_whole(client)


def kill(pids: set[int], number: signal.Signals = signal.SIGKILL) -> None:
    """As hard as it goes, unless told otherwise."""
    assert min(pids) > 0, "not known: to the system 0 is all processes of this one's group"
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # one may have died of another's death
            os.kill(pid, number)
