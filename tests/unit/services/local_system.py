"""A whole service in this process, without Ray and HTTP: every component that takes part in serving, real ones."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import CollectorRegistry

from farsight import services
from farsight.actors.learning.serving_time_estimator import ServingTimeEstimator
from farsight.actors.log.log_store import LogStore
from farsight.actors.runtime.component import Component, ComponentContext, component_class
from farsight.actors.runtime.names import CONTROL, ROUTER
from farsight.actors.runtime.peer import PeerBook, Site
from farsight.actors.scheduling.kv_offload_manager import KVOffloadManager
from farsight.actors.scheduling.router import FleetShell
from farsight.actors.scheduling.scheduler import Scheduler
from farsight.actors.worker.model_worker import ModelWorker
from farsight.core.config.load import FarsightConfig
from farsight.policies.replica.scheduler import ReplicaScheduler
from farsight.services.api.backend import ModelInfo
from farsight.services.ingress.engine_client import EngineClient
from tests.unit.actors.components import until

MODEL = Path(services.__file__).parent / "embedded_model"


@dataclass(frozen=True, slots=True)
class LocalSite(Site):
    """A client served here finds every component in this process."""

    components: dict[str, Component] = field(default_factory=dict)

    def peers(self, local: object = None, host: str = "") -> PeerBook:
        return PeerBook("fused", self.components, CONTROL)


@dataclass(frozen=True, slots=True)
class LocalSystem:
    """What is served, and by whom."""

    site: LocalSite

    @property
    def router(self) -> FleetShell:
        router = self.site.components[ROUTER]
        assert isinstance(router, FleetShell)
        return router

    def scheduler(self, replica: int = 0) -> Scheduler:
        scheduler = self.site.components[f"scheduler-{replica}"]
        assert isinstance(scheduler, Scheduler)
        return scheduler

    def machine(self, replica: int = 0) -> ReplicaScheduler:
        """The state machine of a replica's Scheduler."""
        machine = self.scheduler(replica)._machine
        assert isinstance(machine, ReplicaScheduler)
        return machine

    @asynccontextmanager
    async def ingress(self) -> AsyncIterator[EngineClient]:
        """An ingress replica; what it leaves open at its end, no component is told."""
        served = await self.router.model()
        assert served is not None
        model = ModelInfo("m", 0, served.ready.max_model_len, False, 256)
        client = EngineClient(self.site, model, prefix_block_size=served.prefix_block_size)
        await client.start()
        try:
            yield client
        finally:
            await client.close()


@asynccontextmanager
async def local_system(config: FarsightConfig) -> AsyncIterator[LocalSystem]:
    """As many replicas as the configuration says, all of them up."""
    site = LocalSite(config, str(MODEL), "fused")
    replicas = range(config.model.replicas)
    kinds: dict[str, type[Component]] = {
        "log-store": LogStore,
        ROUTER: component_class(ROUTER, config),
        "serving-time-estimator-0": ServingTimeEstimator,
    }
    kinds |= {f"kv-offload-manager-{replica}": KVOffloadManager for replica in replicas}
    kinds |= {f"worker-{replica}": ModelWorker for replica in replicas}
    kinds |= {f"scheduler-{replica}": Scheduler for replica in replicas}  # they find their workers here
    async with AsyncExitStack() as stack:
        for name, kind in kinds.items():
            site.components[name] = component = kind(ComponentContext(name, site, 0, site.peers(), CollectorRegistry()))
            stack.push_async_callback(component.stop)
            await component.start()
        system = LocalSystem(site)
        await until(lambda: len(system.router._machine.loads()) == len(replicas))
        yield system
