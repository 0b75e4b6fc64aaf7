"""An ingress replica that is too busy to ask for its tokens: it loses no request while it lives."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection
from contextlib import aclosing
from pathlib import Path

import pytest

from actors.scheduling import router
from actors.worker import model_worker, token_channels
from core.messages.tokens import TokenDelta
from core.request import SamplingParams
from services.api.requests import unnamed_request
from tests.unit.actors.components import until
from tests.unit.services.ingress.test_ingress_replicas import ENDLESS, system
from tests.unit.services.local_system import LocalSystem

QUICK_S = 0.005


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
        request = unnamed_request((5, 6), SamplingParams(ENDLESS, ignore_eos=True))
        async with aclosing(client.stream(request)) as deltas:
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
