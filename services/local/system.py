"""Every component that takes part in serving, in this process: real ones, which send each other the same messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from prometheus_client import CollectorRegistry

from farsight.actors.calls.message import Peer
from farsight.actors.runtime.component import Component, ComponentContext, component_class
from farsight.actors.runtime.names import (
    CONTROL,
    LENGTH_PREDICTOR,
    LOG_STORE,
    ROUTER,
    STREAM_STORE,
    initial_counts,
    kind_of,
    scheduler_name,
    wanted_components,
    worker_name,
)
from farsight.actors.runtime.peer import Answering, LocalPeer, PeerBook, Site
from farsight.actors.scheduling.router import FleetShell
from farsight.actors.scheduling.scheduler import Scheduler
from farsight.core.config.load import FarsightConfig
from farsight.core.errors import ConfigError, FarsightError
from farsight.engine.vision.geometry import load_geometry
from farsight.policies.replica.scheduler import ReplicaScheduler
from farsight.services.ingress.engine_client import EngineClient
from farsight.services.ingress.served_model import model_info
from farsight.services.launch.launch import EMBEDDED_MODEL

LOOK_S = 0.005
"""Seconds between two checks whether something has come up, or has ended."""

END_S = 10.0
"""Most seconds that workers have to end the sequences of closed streams."""

T = TypeVar("T")


class LocalPeers(PeerBook):
    """Finds every component in this process, whenever it comes; one that is not here is away."""

    def peer(self, name: str) -> Peer:
        return LocalPeer(self._local, name)


@dataclass(frozen=True, slots=True)
class LocalSite(Site):
    """A client served here finds every component in this process."""

    components: dict[str, Component] = field(default_factory=dict)

    def peers(self, local: Mapping[str, Answering] | None = None, host: str = "") -> PeerBook:
        return LocalPeers("fused", self.components, CONTROL)


class LocalSystem:
    """What is served, and by whom.

    Nothing here starts a broken component again: the first failure ends the system for its callers.

    Args:
        site: The service; its components are added while they start.
    """

    def __init__(self, site: LocalSite) -> None:
        self.site = site
        self._failure: BaseException | None = None
        self._open: set[asyncio.Timeout] = set()

    @property
    def router(self) -> FleetShell:
        router = self.site.components[ROUTER]
        assert isinstance(router, FleetShell)
        return router

    def scheduler(self, replica: int = 0) -> Scheduler:
        """Returns the Scheduler of a replica."""
        scheduler = self.site.components[scheduler_name(str(replica))]
        assert isinstance(scheduler, Scheduler)
        return scheduler

    def machine(self, replica: int = 0) -> ReplicaScheduler:
        """Returns the state machine of a replica's Scheduler."""
        machine = self.scheduler(replica)._machine
        assert isinstance(machine, ReplicaScheduler)
        return machine

    def make(self, name: str) -> Component:
        """Makes a component of this system; it has not started."""
        site = self.site
        context = ComponentContext(name, site, 0, site.peers(), CollectorRegistry())
        site.components[name] = component = component_class(name, site.config)(context)
        component.failed.add_done_callback(self._component_failed)
        return component

    async def while_whole(self, work: Awaitable[T]) -> T:
        """Returns what ``work`` returns.

        Raises:
            FarsightError: A component has failed, or fails meanwhile.
        """
        limit = asyncio.timeout(None if self._failure is None else 0.0)
        try:
            async with limit:
                self._open.add(limit)
                return await work
        except TimeoutError:
            if self._failure is None:
                raise
            raise FarsightError(f"the model cannot go on: {self._failure}") from self._failure
        finally:
            self._open.discard(limit)

    def _component_failed(self, failed: asyncio.Future[None]) -> None:
        if failed.cancelled():
            return
        self._failure = self._failure or failed.exception()
        for limit in self._open:
            limit.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def ingress(self) -> AsyncIterator[EngineClient]:
        """Opens an ingress replica; what it leaves open at its end, no component is told."""
        served = await self.router.model()
        assert served is not None
        model = model_info(self.site, served.ready)
        client = EngineClient(self.site, model, prefix_block_size=served.prefix_block_size, listens=False)
        await client.start()
        try:
            yield client
        finally:
            await client.close()

    async def until_up(self) -> None:
        """Returns once every replica takes requests.

        Raises:
            FarsightError: A component has failed.
        """

        async def look() -> None:
            while len(self.router._machine.loads()) < self.site.config.model.replicas:  # noqa: ASYNC110, of three tasks
                await asyncio.sleep(LOOK_S)

        await self.while_whole(look())

    async def until_idle(self) -> None:
        """Returns once no worker has a sequence, or after ``END_S``."""
        workers = [self.site.components[worker_name(str(each))] for each in range(self.site.config.model.replicas)]
        last = asyncio.get_running_loop().time() + END_S
        while any(each.queue for each in workers) and asyncio.get_running_loop().time() < last:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)


@asynccontextmanager
async def local_system(
    config: FarsightConfig, model_dir: Path = EMBEDDED_MODEL, *, forecasts: bool = True
) -> AsyncIterator[LocalSystem]:
    """Opens as many replicas as the configuration says; all of them are up.

    Args:
        config: ``model.name`` is the name that clients use.
        model_dir: Directory or file of the model.
        forecasts: Whether output lengths are predicted.

    Raises:
        FarsightError: A component cannot start, or the settings need further processes.
    """
    _check(config)
    sees = load_geometry(model_dir) is not None
    system = LocalSystem(LocalSite(config, str(model_dir), "fused", sees=sees))
    names = [name for name in wanted_components(initial_counts(config, sees=sees)) if name != STREAM_STORE]
    async with AsyncExitStack() as stack:
        components = [system.make(name) for name in names if forecasts or kind_of(name) != LENGTH_PREDICTOR]
        for component in components:
            stack.push_async_callback(component.stop)
        await system.site.components[LOG_STORE].start()  # the others write to it and read from it as they start
        starts = [each.start() for each in components if each.name != LOG_STORE]
        for outcome in await asyncio.gather(*starts, return_exceptions=True):
            if outcome is not None:
                raise outcome
        await system.until_up()
        yield system


def _check(config: FarsightConfig) -> None:
    """Raises ConfigError for settings that one process cannot serve."""
    if config.replica:
        raise ConfigError("replica", [each.url for each in config.replica], "none: other servers need `farsight serve`")
    if config.model.num_ranks > 1:
        name = "tensor_parallel" if config.model.tensor_parallel > 1 else "pipeline_parallel"
        raise ConfigError(f"model.{name}", getattr(config.model, name), "1: several processes need `farsight serve`")
