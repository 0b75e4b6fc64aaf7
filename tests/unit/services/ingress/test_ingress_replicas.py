"""Several ingress replicas at work against one Router: real components, real messages, prompts hashed where they
come."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from farsight.actors.scheduling import router
from farsight.actors.worker import model_worker, token_channels
from farsight.core.config.engine import EngineConfig, ModelConfig
from farsight.core.config.learning import LogConfig, PredictorConfig
from farsight.core.config.load import FarsightConfig
from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.config.server import ServerConfig
from farsight.core.decisions import unpack_decisions
from farsight.core.errors import CapacityError
from farsight.core.messages.tokens import TokenDelta
from farsight.core.request import Origin, Request, SamplingParams
from farsight.policies.compose import forecasting_presets, predicts_requests
from farsight.policies.presets import PRESETS
from farsight.services.api.requests import unnamed_request
from farsight.services.ingress.engine_client import EngineClient
from farsight.services.ingress.served_model import why_no_forecasts
from farsight.services.local.system import LocalSystem, local_system
from tests.unit.actors.components import LONG_S, until

NUM_REPLICAS = 3
NUM_ROUNDS = 4
QUICK_S = 0.005
BLOCK_SIZE = 8
PREFIX_LEN = 40 * BLOCK_SIZE
OWN_LEN = 5
ENDLESS = 50_000
"""Tokens of a stream that goes on until it is ended: minutes."""

PROFILE = {
    "base_s": 0.005,
    "prefill_token_s": 1e-6,
    "decode_seq_s": 0.0,
    "context_token_s": 0.0,
    "kv_bytes": 1024,
    "copy_bandwidth": 1e9,
}


def configured(directory: Path) -> FarsightConfig:
    """Replicas on emulated devices, under placement by prefix."""
    directory.mkdir()
    profile = directory / "quick.json"
    profile.write_text(json.dumps(PROFILE))
    return FarsightConfig(
        model=ModelConfig(name="m", replicas=NUM_REPLICAS),
        engine=EngineConfig(f"emulated:{profile}", "256MiB", block_size=BLOCK_SIZE, max_model_len=2 * ENDLESS),
        scheduler=SchedulerConfig(preset="preble"),
        log=LogConfig(path=str(directory / "log.sqlite")),
    )


@asynccontextmanager
async def system(directory: Path) -> AsyncIterator[LocalSystem]:
    async with asyncio.timeout(LONG_S), local_system(configured(directory), forecasts=False) as found:
        yield found


@dataclass(frozen=True)
class Served:
    """Where a request went, and how much of its prompt was there."""

    replica: str
    cached_len: int


def group_of(number: int) -> int:
    """Each round has one of each, in another order than the round before."""
    return (number + number // NUM_REPLICAS) % NUM_REPLICAS


def prompt(number: int) -> tuple[int, ...]:
    """All of a group begin alike; none ends like another."""
    group = group_of(number)
    return (*range(50 * group, 50 * group + 40), *(7,) * (PREFIX_LEN - 40), *(number + 10,) * OWN_LEN)


async def serve(client: EngineClient, number: int) -> Served:
    origin = Origin(f"cmpl-{number:032x}")
    cached_len = 0
    sampling = SamplingParams(3, ignore_eos=True)
    async with aclosing(client.stream(unnamed_request(prompt(number), sampling, origin=origin))) as deltas:
        async for delta in deltas:
            cached_len += delta.cached_len
    while True:  # its account may be on the way from a Scheduler to the log
        decisions = [
            each
            for trace in await client.overview.explain(origin.response_id)
            for each in unpack_decisions(trace.decisions)
        ]
        placed = [str(each.facts["replica"]) for each in decisions if each.kind == "placed"]
        if placed:
            return Served(placed[0], cached_len)
        await asyncio.sleep(0.01)


async def serve_rounds(directory: Path, num_ingresses: int) -> list[Served]:
    """One after the other; each round comes in at the next ingress replica."""
    async with system(directory) as found, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(found.ingress()) for _ in range(num_ingresses)]
        numbers = range(NUM_ROUNDS * NUM_REPLICAS)
        return [await serve(clients[number // NUM_REPLICAS % num_ingresses], number) for number in numbers]


def renamed(rounds: list[Served]) -> list[tuple[int, int]]:
    """Replicas by the order in which requests met them: which of the empty ones is first depends on their starts."""
    met = list(dict.fromkeys(served.replica for served in rounds))
    return [(met.index(served.replica), served.cached_len) for served in rounds]


async def test_placement_does_not_depend_on_where_requests_come_in(tmp_path: Path) -> None:
    through_one, through_three = [await serve_rounds(tmp_path / str(num), num) for num in (1, 3)]
    assert renamed(through_three) == renamed(through_one)
    homes = {group_of(number): through_three[number].replica for number in range(NUM_REPLICAS)}
    assert sorted(homes.values()) == ["0", "1", "2"]
    for number, served in enumerate(through_three):
        found_len = 0 if number < NUM_REPLICAS else PREFIX_LEN
        assert served == Served(homes[group_of(number)], found_len), "what came elsewhere had computed it"


async def test_prompts_that_begin_alike_meet_however_they_come(tmp_path: Path) -> None:
    """All at once, before any of them is cached."""
    async with system(tmp_path / "system") as found, found.ingress() as a, found.ingress() as b:
        numbers = range(8 * NUM_REPLICAS)
        served = await asyncio.gather(*(serve((a, b)[number // NUM_REPLICAS % 2], number) for number in numbers))
    homes = {(group_of(number), served[number].replica) for number in numbers}
    assert sorted(replica for _, replica in homes) == ["0", "1", "2"]


async def test_what_is_in_flight_is_counted_over_all_ingress_replicas(tmp_path: Path) -> None:
    config = dataclasses.replace(
        configured(tmp_path / "system"),
        server=ServerConfig(max_queued_requests=5, max_queued_requests_per_key=3, max_wait_s=0.0),
    )
    whole = local_system(config, forecasts=False)
    async with asyncio.timeout(LONG_S), whole as found, found.ingress() as a, found.ingress() as b:
        streams = [each.stream(_endless(number), key="x") for number, each in enumerate((a, b, a))]
        streams += [a.stream(_endless(number)) for number in (3, 4)]
        for stream in streams:
            await anext(stream)
        await until(lambda: b.first_check.in_flight[0] == a.first_check.in_flight[0] == 5)
        with pytest.raises(CapacityError, match="too many requests in flight: 5, limit 5; retry in"):
            await anext(b.stream(_endless(5)))
        await streams.pop().aclose()
        await until(lambda: b.first_check.in_flight[0] == 4)
        with pytest.raises(CapacityError, match="too many requests of your tenant in flight: 3, limit 3"):
            await anext(b.stream(_endless(5), key="x"))
        streams.append(b.stream(_endless(5), key="y"))
        await anext(streams[-1])
        for stream in streams:
            await stream.aclose()
        await until(lambda: b.first_check.in_flight[0] == a.first_check.in_flight[0] == 0)


async def test_a_request_that_was_admitted_wrongly_ends_with_an_error(tmp_path: Path) -> None:
    """Its device takes one request at a time, which never ends."""
    config = configured(tmp_path / "system")
    config = dataclasses.replace(
        config,
        model=ModelConfig(name="m"),
        engine=dataclasses.replace(config.engine, max_num_seqs=1),
        scheduler=SchedulerConfig(preset="fcfs"),
        server=ServerConfig(max_wait_s=0.1, first_token_deadline_s=0.1),
    )
    async with asyncio.timeout(LONG_S), local_system(config, forecasts=False) as found, found.ingress() as client:
        client.first_check._check_delay = lambda *_: 0.0  # type: ignore[method-assign]
        first = client.stream(_endless(0))
        await anext(first)
        [last] = [delta async for delta in client.stream(_endless(1))]
        assert last.finish_reason == "error" and last.error is not None
        assert last.error.startswith("no token within ")
        assert (await anext(first)).finish_reason is None
        await first.aclose()


def _endless(number: int) -> Request:
    return unnamed_request(prompt(number), SamplingParams(ENDLESS, ignore_eos=True))


class Endless:
    """Streams of one client that go on until they are ended."""

    def __init__(self, client: EngineClient, numbers: Sequence[int]) -> None:
        self.attempts: set[int] = set()
        self.num_deltas = 0
        self._tasks = [asyncio.create_task(self._read(client, number)) for number in numbers]

    async def _read(self, client: EngineClient, number: int) -> None:
        async with aclosing(client.stream(_endless(number))) as deltas:
            async for delta in deltas:
                assert delta.finish_reason is None
                self.attempts.add(delta.attempt)
                self.num_deltas += 1

    async def go_on(self) -> None:
        """Until each may have got more."""
        seen = self.num_deltas
        await until(lambda: self.num_deltas >= seen + 3 * len(self._tasks) or any(task.done() for task in self._tasks))
        assert not any(task.done() for task in self._tasks)

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def test_a_death_takes_the_requests_of_its_own_clients_alone(tmp_path: Path) -> None:
    async with system(tmp_path / "system") as found, found.ingress() as alive:

        def num_held() -> int:
            return sum(each.num_waiting + each.num_admitted for each in map(found.machine, range(NUM_REPLICAS)))

        async with found.ingress() as dead:
            theirs, ours = Endless(dead, range(6)), Endless(alive, range(6, 10))
            await theirs.go_on()
            await ours.go_on()
            await until(lambda: found.router.queue == num_held() == 10)
        await until(lambda: found.router.queue == num_held() == 4)
        await ours.go_on()
        assert ours.attempts == {0}, "none was begun again"
        await theirs.end()
        await ours.end()
        await until(lambda: found.router.queue == num_held() == 0)


async def test_an_upgrade_ends_open_requests_on_replaced_weights_alone(tmp_path: Path) -> None:
    """Those that take too long; new requests wait for a replica with their weights, and go nowhere else."""
    async with system(tmp_path / "system") as found, found.ingress() as client:
        endless = _endless(0)
        async with aclosing(client.stream(endless)) as old, aclosing(client.stream(endless)) as new:
            await anext(old)
            await client.open_requests.use_weights(1, 0)
            assert (client.open_requests.model_version, client.open_requests.oldest_version) == (1, 0)
            waiting = asyncio.ensure_future(anext(new))
            await until(lambda: found.router.queue == 2)
            assert sum(len(each.requests) for each in found.router._machine._table.replicas()) == 1
            await client.open_requests.use_weights(1, 1)
            ends = [delta async for delta in old][-1]
            assert ends.finish_reason == "error" and "its weights were replaced" in (ends.error or "")
            assert client.open_requests.oldest_version == 1 and not waiting.done()
            client.open_requests.end_streams("the server is stopping")
            assert "the server is stopping" in ((await waiting).error or "")
            continued = dataclasses.replace(endless, output_ids=(5, 6), model_version=0)
            (end,) = [delta async for delta in client.stream(continued)]
            assert end.finish_reason == "error" and "its weights were replaced" in (end.error or "")
            assert client.model.version == 1
        await until(lambda: found.router.queue == 0)


class Lives:
    """What Ray would say of the ingress replicas, and how often each component was told of one that lives."""

    def __init__(self, service: LocalSystem) -> None:
        self.living: set[str] = set()
        self.num_saved: Counter[str] = Counter()
        for name, component in service.site.components.items():

            async def gone(ingress_ids: Collection[str], name: str = name) -> frozenset[str]:
                self.num_saved[name] += len(self.living & set(ingress_ids))
                return frozenset(ingress_ids) - self.living

            component.context = dataclasses.replace(component.context, gone=gone)


async def test_a_busy_ingress_replica_keeps_its_requests_and_a_dead_one_leaves_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module, name in ((token_channels, "TICK_S"), (model_worker, "TICK_S"), (token_channels, "SILENCE_S")):
        monkeypatch.setattr(module, name, QUICK_S)
    monkeypatch.setattr(router, "FORGET_AFTER_S", -1.0)
    async with system(tmp_path / "service") as service, service.ingress() as client:
        lives = Lives(service)
        lives.living.add(client.ingress_id)
        async with aclosing(client.stream(_endless(0))) as deltas:
            read: list[TokenDelta] = [await anext(deltas)]
            (name,) = (f"worker-{stream.replica}" for stream in client._ledger._open.values())
            worker = service.site.components[name]
            assert isinstance(worker, model_worker.ModelWorker)
            pumps = dict(client._pumps)
            for task in pumps.values():
                task.cancel()
            before = lives.num_saved[name]
            await until(lambda: lives.num_saved[name] >= before + 3)
            await service.router._lose_dead()
            assert lives.num_saved["router"] == 1 and service.router._machine.num_in_flight == 1
            client._pumps.clear()
            client._follow(pumps)
            while len(read) < 20:
                read.append(await anext(deltas))
            assert {delta.attempt for delta in read} == {0}
            ends = [delta.start + delta.num_tokens for delta in read]
            assert [delta.start for delta in read] == [0, *ends[:-1]]
            for task in [*client._pumps.values(), *client._tasks]:  # it hears of nothing any more
                task.cancel()
            lives.living.clear()
            await until(lambda: not worker._built.result().ingress_ids)
            await service.router._lose_dead()
            assert service.router._machine.num_in_flight == 0


def under(preset: str, **predictor: object) -> FarsightConfig:
    return FarsightConfig(scheduler=SchedulerConfig(preset=preset), predictor=PredictorConfig(**predictor))  # type: ignore[arg-type]


def test_the_presets_that_make_forecasts_are_named() -> None:
    for preset in PRESETS:
        assert bool(why_no_forecasts(under(preset))) != predicts_requests(under(preset))
    said = why_no_forecasts(under("fcfs"))
    assert said.startswith("Preset fcfs makes no forecasts")
    assert {"farsight", "magnus"} <= set(forecasting_presets()) and ", ".join(forecasting_presets()) in said


def test_a_predictor_makes_them_under_any_preset_and_a_setting_may_stop_them() -> None:
    assert why_no_forecasts(under("fcfs", artefact="trained")) == ""
    assert "predictor.from_traffic is off" in why_no_forecasts(under("farsight", from_traffic=False))
