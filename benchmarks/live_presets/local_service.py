"""A service in one process: the hosts and components that serve, and an ingress replica of it, without Ray and HTTP."""

from __future__ import annotations

import asyncio
import time
from collections import ChainMap
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from farsight.actors.calls.message import Peer
from farsight.actors.calls.scheduling import LengthPredictorCalls
from farsight.actors.runtime.component import Component, ComponentContext
from farsight.actors.runtime.host import ComponentHost
from farsight.actors.runtime.names import LOG_STORE, by_host, initial_counts, length_predictor_name, wanted_components
from farsight.actors.runtime.peer import Answering, LocalPeer, PeerBook, Site
from farsight.actors.scheduling.scheduler import FEED_S
from farsight.core.config.load import FarsightConfig
from farsight.core.forecast import QUANTILES, Forecast, ForecastQuestions, Forecasts
from farsight.services.api.backend import ModelInfo
from farsight.services.ingress.engine_client import EngineClient

_SERVING = ("Router", "Batcher", "Scheduler", "ModelWorker")
"""Kinds of components without which nothing is served."""

_NOTHING_KNOWN = Forecast(1.0, (1.0,) * len(QUANTILES), 0, "none", 0)
"""A forecast without samples: no component uses it."""


class LocalBook(PeerBook):
    """Every component is in this process, or nowhere."""

    def __init__(self, components: Mapping[str, Answering]) -> None:
        super().__init__("fused")
        self._components = components

    def peer(self, name: str) -> Peer:
        return LocalPeer(self._components, name)


@dataclass(slots=True)
class LocalSite:
    """As ``actors.runtime.peer.Site``, for hosts that are all here."""

    config: FarsightConfig
    model_dir: str
    placement: str = "fused"
    model_version: int = 0
    model_since: float = 0.0
    sees: bool = False
    components: ChainMap[str, Answering] = field(default_factory=ChainMap)

    def peers(self, local: dict[str, Answering] | None = None, host: str = "") -> PeerBook:
        if local is not None:
            self.components.maps.append(local)
        return LocalBook(self.components)


class GivenForecasts(Component, LengthPredictorCalls):
    """Stands in for the LengthPredictor: it answers with the forecast of the request that the question names."""

    kind = "LengthPredictor"

    def __init__(self, context: ComponentContext, forecasts: Mapping[str, Forecast]) -> None:
        super().__init__(context)
        self._forecasts = forecasts

    async def predict(self, questions: ForecastQuestions) -> Forecasts:
        """The user inputs of the questions are names of forecasts."""
        return Forecasts(tuple(self._forecasts[each.user_input] for each in questions.questions))

    async def forecast(self) -> Forecast:
        """A ``Forecast`` that knows nothing."""
        return _NOTHING_KNOWN


@dataclass(slots=True)
class Service:
    """A running service."""

    client: EngineClient
    hosts: list[ComponentHost]

    async def metric(self, name: str) -> float:
        """The sum of the samples of this name, when everything has been counted."""
        await asyncio.sleep(2 * FEED_S)
        pages = [await host.metrics() for host in self.hosts]
        return sum(
            sample.value
            for page in pages
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == name
        )


@asynccontextmanager
async def running(config: FarsightConfig, forecasts: Mapping[str, Forecast], model_dir: Path) -> AsyncIterator[Service]:
    """A service without a log.

    Args:
        forecasts: By name; requests wait for theirs if ``predictor.artefact`` says that there are any.
    """
    local = LocalSite(config, str(model_dir))
    site = cast(Site, local)  # a Site names actors of Ray; components ask it for its peers and settings alone
    predictor = length_predictor_name(0)
    context = ComponentContext(predictor, site, 0, site.peers(), CollectorRegistry())
    local.components[predictor] = GivenForecasts(context, forecasts)
    components = [
        name
        for name in wanted_components(initial_counts(config), config.model.num_ranks)
        if name not in (LOG_STORE, predictor)
    ]
    named = by_host(components, site.placement)
    async with AsyncExitStack() as ends:
        hosts = {name: ComponentHost(name, site, 0) for name in named}
        for name, host in hosts.items():
            # Before it starts: uvloop would wait for ever for the sockets of a host that failed and was not closed.
            ends.push_async_callback(host.close)
            await host.add(named[name])
        await _up(hosts.values())
        served = await site.peers().router().model()
        assert served is not None
        model = ModelInfo("emulated", int(time.time()), config.engine.max_model_len, False, 0, benchmark_mode=True)
        client = EngineClient(site, model, prefix_block_size=served.prefix_block_size)
        ends.push_async_callback(client.close)
        await client.start()
        yield Service(client, list(hosts.values()))


async def _up(hosts: Iterable[ComponentHost]) -> None:
    """Returns when every replica has a worker, and the Router knows of one."""
    while True:
        components = [component for host in hosts for component in (await host.rows()).components]
        if all(component.state == "ready" for component in components if component.kind in _SERVING):
            return
        await asyncio.sleep(FEED_S)
